"""This module describes the hardware that machines must have in common if their bandwidths or bits are compared."""

from __future__ import annotations

import os
import platform

from everstep.system import procfs


def gpus() -> int:
    """Return the number of NVIDIA GPUs that the driver shows; 0 without a driver."""
    return len(procfs.nvidia_gpus())


def hardware() -> str:
    """Return model and number of processors and GPUs."""
    processor = procfs.processor_model() or platform.machine()
    return f"{os.cpu_count()} x {processor}{_gpu_models()}"


def arithmetic() -> str:
    """Return the hardware and the properties of torch that its results depend on bit for bit; imports torch."""
    import torch

    parts = [hardware(), f"torch {torch.__version__}", f"{torch.get_num_threads()} threads"]
    parts.append(torch.backends.cpu.get_cpu_capability())
    return ", ".join(parts)


def _gpu_models() -> str:
    models = [gpu["Model"] for gpu in procfs.nvidia_gpus().values() if "Model" in gpu]
    driver = procfs.nvidia_driver() if models else ""
    counted = "".join(f", {models.count(model)} x {model}" for model in dict.fromkeys(models))
    return counted + (driver and f", {driver}")
