"""Gives the cost of a token and the peak rate of a GPU, from which the model FLOPs utilization (MFU) is computed."""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch

from everstep.model.topology import Topology
from everstep.rank.step_reports import Flops

PER_PARAMETER = 6
"""Floating point operations for each parameter and token, forward and backward (Kaplan et al. 2020, section 2.1). The
further operations of attention, which depend on the length of the text, are left out."""

PEAKS = (
    ("B200", 2250e12),
    ("H200", 989.4e12),
    ("H20", 148e12),
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989.4e12),
    ("H800 PCIe", 756e12),
    ("H800", 989.4e12),
    ("A100", 312e12),
    ("A800", 312e12),
    ("L40S", 362e12),
    ("A10G", 70e12),
    ("A10", 125e12),
    ("V100", 125e12),
)
"""Words of a GPU's name, and its bfloat16 operations per second without sparsity (V100: float16), from NVIDIA's data
sheets. The first match counts."""


def peak_of(name: str) -> float:
    """The peak rate of a GPU, by the name that CUDA reports, in operations per second; 0: not known."""
    words = set(re.split(r"[\s-]+", name))
    return next((peak for model, peak in PEAKS if words.issuperset(model.split())), 0.0)


def device_peak() -> float:
    """The peak rate of this process's GPU, in operations per second; 0: it uses no GPU, or ``PEAKS`` lacks the GPU."""
    in_use: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return peak_of(torch.cuda.get_device_name()) if in_use else 0.0


def with_defaults(by_script: Flops, things: Iterable[object], topology: Topology) -> Flops:
    """Complete the script's numbers from the models of the checkpoint and from the device.

    Args:
        by_script: The script's numbers; 0 if it set none.
        things: The objects of the checkpoint.
        topology: The job's topology.
    """
    models = [thing for thing in things if isinstance(thing, torch.nn.Module)]
    derived = not by_script.per_token
    per_token = share_per_token(models, topology) if derived else by_script.per_token
    return Flops(per_token, by_script.peak or device_peak(), derived and per_token > 0)


def share_per_token(models: Iterable[torch.nn.Module], topology: Topology) -> float:
    """Floating point operations for a token with this rank's share of the models.

    Each rank computes with the complete parameter if it is sharded over data-parallel ranks (FSDP), and with its share
    if it is sharded over other axes (tensor parallelism).
    """
    distinct = {id(parameter): parameter for model in models for parameter in model.parameters()}
    return float(PER_PARAMETER * sum(_computed(parameter, topology) for parameter in distinct.values()))


def _computed(parameter: torch.nn.Parameter, topology: Topology) -> int:
    placements = getattr(parameter, "placements", None)
    if placements is None:
        return parameter.numel()
    mesh = parameter.device_mesh  # type: ignore[attr-defined]  # a DTensor
    count = parameter.numel()
    for axis, (name, placement) in enumerate(zip(mesh.mesh_dim_names or [""] * mesh.ndim, placements, strict=True)):
        if placement.is_shard() and name and name not in topology.data_axes:
            count = -(-count // mesh.size(axis))
    return count
