"""Which tensors of a state may be copied while training goes on, and how changes to them are noticed.

Nothing but an optimizer's step changes parameters and the optimizer's state, and that step can be made to wait. So the
parameters that a given ``torch.optim.Optimizer`` trains, and the tensors in its state, are copied during the next
forward and backward pass. Everything else is copied before training goes on: forward may change it (statistics of a
BatchNorm, generators, an average of weights), or it is not known what changes it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from everstep.slots.tensor_table import TensorSpec

PROBES = 64
"""Tensors that are probed at most: some microseconds a save."""
PROBE_BYTES = 64
"""Bytes that are probed of each tensor: a cache line."""

Watched = list[tuple[str, Tensor]]


class Probe(NamedTuple):
    """Some bytes of a tensor."""

    name: str
    address: int
    offset: int | None
    """Their offset in the slot's tensors; None: they are in another order there."""


def classify(
    things: Iterable[Any], tensors: Sequence[Tensor], specs: Sequence[TensorSpec]
) -> tuple[list[bool], Watched]:
    """Which tensors change in ``optimizer.step`` only.

    Args:
        things: The objects given to ``Run.checkpoint``: models, optimizers, others.
        tensors: The tensors of the encoded state.
        specs: Their entries in the table.

    Returns:
        For each tensor whether its copy may overlap training, and those
        parameters and optimizer states, with names, whose version counters show
        whether they are changed all the same.
    """
    stepped: list[tuple[int, Tensor]] = []
    other: set[int] = set()
    for thing in things:
        if isinstance(thing, torch.optim.Optimizer) and _waits(thing):
            for tensor in _trained(thing):
                stepped += [(_memory(tensor), tensor), (_memory(tensor), _local(tensor))]
        elif isinstance(thing, torch.nn.Module):
            other |= {_memory(buffer) for buffer in thing.buffers()}
    allowed = {memory for memory, tensor in stepped if not tensor.is_inference()} - other
    memories = [_memory(tensor) for tensor in tensors]
    later = [
        memory in allowed and bool(spec.nbytes) and tensor.device.type in {"cpu", "cuda"}
        for memory, tensor, spec in zip(memories, tensors, specs, strict=True)
    ]
    names = {memory: spec.name for memory, spec, is_later in zip(memories, specs, later, strict=True) if is_later}
    return later, [(names[memory], tensor) for memory, tensor in stepped if memory in names]


class Witness:
    """The state of tensors when their copy began.

    Version counters notice every change that torch knows of. Changes by way of ``.data``, and those of fused kernels,
    leave no trace there, so a cache line of some tensors is kept too.

    Args:
        watched: From ``classify``.
        probed: From ``probes``.
    """

    def __init__(self, watched: Watched, probed: Sequence[Probe]) -> None:
        self._watched = watched
        self._versions = [tensor._version for _, tensor in watched]
        self._probed = [(probe, ctypes.string_at(probe.address, PROBE_BYTES)) for probe in probed]

    def changed(self) -> str:
        """Name of a tensor that is no longer as it was; empty: none is known to have changed."""
        for (name, tensor), version in zip(self._watched, self._versions, strict=True):
            if tensor._version != version:
                return name
        for probe, before in self._probed:
            if ctypes.string_at(probe.address, PROBE_BYTES) != before:
                return probe.name
        return ""

    def missed(self, address: int) -> str:
        """Name of a tensor whose copy is not what it was when the copy began; empty: none is known.

        Args:
            address: Of the copied tensors.
        """
        for probe, before in self._probed:
            if probe.offset is not None and ctypes.string_at(address + probe.offset, PROBE_BYTES) != before:
                return probe.name
        return ""


def probes(tensors: Sequence[Tensor], specs: Sequence[TensorSpec], later: Sequence[bool]) -> list[Probe]:
    """Where changes are looked for: in the middle of up to ``PROBES`` tensors in the memory of the host."""
    fit = [
        (tensor, spec)
        for tensor, spec, is_later in zip(tensors, specs, later, strict=True)
        if is_later and tensor.is_cpu and spec.nbytes >= PROBE_BYTES and _dense(tensor)
    ]
    found = []
    for tensor, spec in fit[:: -(-len(fit) // PROBES) or 1]:
        into = (spec.nbytes - PROBE_BYTES) // 2
        offset = spec.offset + into if tensor.is_contiguous() else None
        found.append(Probe(spec.name, tensor.data_ptr() + into, offset))
    return found


def _waits(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer's step calls torch's hooks each time.

    An optimizer that skips torch's constructor does not call them, nor does the replay of a CUDA graph, which also
    leaves no trace in version counters; an optimizer has to be ``capturable`` for that.
    """
    graphed = any(group.get("capturable") for group in optimizer.param_groups)
    return bool(getattr(type(optimizer).step, "hooked", False)) and not graphed


def _trained(optimizer: torch.optim.Optimizer) -> Iterable[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]
    for state in optimizer.state.values():
        if isinstance(state, dict):
            yield from (value for value in state.values() if isinstance(value, Tensor))


def _dense(tensor: Tensor) -> bool:
    """Whether a tensor fills its piece of memory without gaps; the order of its axes does not count."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return reach == tensor.numel()


def _local(tensor: Tensor) -> Tensor:
    """The shard of a DTensor; any other tensor as it is."""
    local: Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


def _memory(tensor: Tensor) -> int:
    """Address of a tensor's storage, equal for tensors that share memory."""
    return _local(tensor).untyped_storage().data_ptr()
