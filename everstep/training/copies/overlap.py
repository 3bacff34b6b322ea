"""Decides which tensors of a state may be copied while training continues, and notices changes to them.

Only ``optimizer.step`` changes parameters and the optimizer's state, and that step can be made to wait. So the
parameters that a ``torch.optim.Optimizer`` of the checkpoint trains, and the tensors in its state, are copied during
the next forward and backward pass. All other tensors are copied before training continues: forward may change them
(statistics of a BatchNorm, generators, an average of weights), or it is not known what changes them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from itertools import compress
from operator import attrgetter, ne
from typing import Any, NamedTuple

import torch
from torch import Tensor

from everstep.slots.tensor_table import TensorSpec
from everstep.training.state.subclasses import parts_of

PROBES = 64
"""At most this many tensors are probed. The probes take some microseconds in each save."""
PROBE_BYTES = 64
"""Bytes of each tensor that are probed: one cache line."""

_version = attrgetter("_version")


STATES = 512
"""At most this many tensors in the states of optimizers are watched at once: each takes 0.1 us in every save."""


class Watched:
    """Tensors whose version counters are compared.

    Args:
        parameters: The parameters with their names.
        states: The tensors in the states of optimizers, with their names.
    """

    def __init__(
        self, parameters: Sequence[tuple[str, Tensor]] = (), states: Sequence[tuple[str, Tensor]] = ()
    ) -> None:
        self.parameters, self.states = parameters, states
        self._trained = [tensor for _, tensor in parameters]
        self._kept = [tensor for _, tensor in states]

    def part(self, turn: int) -> list[Tensor]:
        """All parameters, and the next ``STATES`` of the states: other ones at each turn."""
        begin = turn * STATES % max(len(self._kept), 1)
        return [*self._trained, *self._kept[begin : begin + STATES]]

    def name(self, tensor: Tensor) -> str:
        """The name of a tensor."""
        return next(name for name, one in (*self.parameters, *self.states) if one is tensor)


class Probe(NamedTuple):
    """The ``PROBE_BYTES`` bytes of a tensor by which a change is noticed."""

    name: str
    address: int
    offset: int | None
    """Offset of these bytes in the slot's tensors; None: the tensor has another order in the slot."""


def classify(
    things: Iterable[Any], tensors: Sequence[Tensor], specs: Sequence[TensorSpec]
) -> tuple[list[bool], Watched]:
    """Find the tensors that only ``optimizer.step`` changes.

    Args:
        things: The objects of ``Run.checkpoint``: models, optimizers, others.
        tensors: The tensors of the encoded state.
        specs: The entries of the tensors in the table.

    Returns:
        For each tensor whether it may be copied while training continues; and, with names, the parameters and optimizer
        states whose version counters show unexpected changes of these tensors.
    """
    stepped: dict[int, tuple[int, Tensor]] = {}
    """Id of a tensor → its memory, and itself."""
    parameters: list[Tensor] = []
    other: set[int] = set()
    for thing in things:
        if isinstance(thing, torch.optim.Optimizer) and _waits(thing):
            parameters += [parameter for group in thing.param_groups for parameter in group["params"]]
            for tensor in _trained(thing):
                for part in parts_of(tensor):
                    stepped |= {id(one): (_memory(part), one) for one in (tensor, part)}
        elif isinstance(thing, torch.nn.Module):
            other |= {_memory(part) for buffer in thing.buffers() for part in parts_of(buffer)}
    allowed = {memory for memory, tensor in stepped.values() if not tensor.is_inference()} - other - {0}
    memories = [_memory(tensor) for tensor in tensors]
    later = [
        memory in allowed and bool(spec.nbytes) and tensor.device.type in {"cpu", "cuda"}
        for memory, tensor, spec in zip(memories, tensors, specs, strict=True)
    ]
    names = {memory: spec.name for memory, spec, is_later in zip(memories, specs, later, strict=True) if is_later}
    watched = [(names[memory], tensor) for memory, tensor in stepped.values() if memory in names]
    is_trained = {id(one) for parameter in parameters for one in (parameter, *parts_of(parameter))}
    return later, Watched(
        [entry for entry in watched if id(entry[1]) in is_trained],
        [entry for entry in watched if id(entry[1]) not in is_trained],
    )


class Witness:
    """Notices changes of tensors since their copy began.

    Version counters show every change that torch knows of. They do not show changes through ``.data`` and by fused
    kernels, so some bytes of some tensors are compared too.

    Args:
        watched: The tensors, from ``classify``.
        probed: The bytes to compare, from ``probes``.
        turn: Which of the states are watched.
    """

    def __init__(self, watched: Watched, probed: Sequence[Probe], turn: int = 0) -> None:
        self._watched = watched
        self._tensors = watched.part(turn)
        self._versions = list(map(_version, self._tensors))
        self._probed = [(probe, ctypes.string_at(probe.address, PROBE_BYTES)) for probe in probed]

    def changed(self) -> str:
        """Name of a tensor that has changed; empty: no change was noticed."""
        now = list(map(_version, self._tensors))
        if now != self._versions:
            return self._watched.name(next(compress(self._tensors, map(ne, now, self._versions))))
        for probe, before in self._probed:
            if ctypes.string_at(probe.address, PROBE_BYTES) != before:
                return probe.name
        return ""

    def missed(self, address: int) -> str:
        """Name of a tensor whose copy differs from what the tensor was when the copy began; empty: none was noticed.

        Args:
            address: Address of the tensors in the slot.
        """
        for probe, before in self._probed:
            if probe.offset is not None and ctypes.string_at(address + probe.offset, PROBE_BYTES) != before:
                return probe.name
        return ""


def probes(tensors: Sequence[Tensor], specs: Sequence[TensorSpec], later: Sequence[bool]) -> list[Probe]:
    """Probes in the middle of up to ``PROBES`` of the tensors in the host's memory that are copied later."""
    fit = [
        (tensor, spec)
        for tensor, spec, is_later in zip(tensors, specs, later, strict=True)
        if is_later and tensor.is_cpu and spec.nbytes >= PROBE_BYTES and _dense(tensor)
    ]
    chosen = []
    for tensor, spec in fit[:: -(-len(fit) // PROBES) or 1]:
        middle = (spec.nbytes - PROBE_BYTES) // 2
        offset = spec.offset + middle if tensor.is_contiguous() else None
        chosen.append(Probe(spec.name, tensor.data_ptr() + middle, offset))
    return chosen


def _waits(optimizer: torch.optim.Optimizer) -> bool:
    """Whether each step of an optimizer calls torch's hooks, so that it can be made to wait.

    An optimizer that skips torch's constructor does not call the hooks. If an optimizer is ``capturable``, its steps
    may be replayed by a CUDA graph. Such a replay calls no hooks, and does not change version counters.
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
    """Whether a tensor fills its memory without gaps, in any order of its axes."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return reach == tensor.numel()


def _memory(tensor: Tensor) -> int:
    """Address of a tensor's storage, equal for tensors that share memory; 0: it has none of its own."""
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided and not tensor.is_nested else 0
