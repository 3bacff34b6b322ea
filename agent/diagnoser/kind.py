"""What machines must have in common so that their bandwidths, or even their bits, can be compared."""

from __future__ import annotations

import os
import platform
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")
"""The driver lists its GPUs here, one folder each; looking opens none of them."""


def gpus() -> int:
    """How many GPUs of NVIDIA the driver shows; 0 without one."""
    try:
        return sum(1 for _ in NVIDIA_GPUS.iterdir())
    except OSError:
        return 0


def hardware() -> str:
    """Model and number of processors and GPUs."""
    try:
        lines = CPUINFO.read_text().splitlines()
        processor = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        processor = platform.machine()
    return f"{os.cpu_count()} x {processor}{_gpu_models()}"


def arithmetic() -> str:
    """The same, with all of torch that its results depend on bit for bit, behind it; imports it."""
    import torch

    parts = [hardware(), f"torch {torch.__version__}", f"{torch.get_num_threads()} threads"]
    parts.append(torch.backends.cpu.get_cpu_capability())
    return ", ".join(parts)


def _gpu_models() -> str:
    try:
        found = [
            line.partition(":")[2].strip()
            for folder in sorted(NVIDIA_GPUS.iterdir())
            for line in (folder / "information").read_text().splitlines()
            if line.startswith("Model")
        ]
        driver = Path("/proc/driver/nvidia/version").read_text().splitlines()[0] if found else ""
    except (OSError, IndexError):
        return ""
    return "".join(f", {found.count(model)} x {model}" for model in dict.fromkeys(found)) + (driver and f", {driver}")
