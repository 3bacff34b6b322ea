"""Plans a copy into a slot: which tensors are copied at once and which later, in batches for each device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from everstep.slots.tensor_table import TensorSpec
from everstep.training.copies.copier import LARGE, Batch
from everstep.training.copies.overlap import Watched, Witness, classify, probes
from everstep.training.state.codec import Encoded

HOST = "cpu"
Pieces = list[tuple[str, Batch]]
"""Batches, each with the device of its tensors as ``torch.device`` prints it."""


class CopyPlan:
    """A plan. It is used again while the layout, and the addresses of the tensors that are copied later, do not change.

    Args:
        things: The objects of ``Run.checkpoint``.
        encoded: The state.
        overlap: Whether tensors that only optimizers change are copied later.
        parts: For each device, the tensors that are copied later are divided into this many batches. If no tensor is
            copied later, all tensors are divided in this way.
    """

    def __init__(self, things: Iterable[Any], encoded: Encoded, *, overlap: bool, parts: int) -> None:
        tensors, specs = encoded.tensors, encoded.layout.specs
        later, self._watched = classify(things, tensors, specs) if overlap else ([False] * len(tensors), Watched())
        self._probed = probes(tensors, specs, later)
        self._layout = encoded.layout
        self._later = [index for index, is_later in enumerate(later) if is_later]
        now = [index for index, is_later in enumerate(later) if not is_later]
        self._now = [index for index in now if index >= encoded.kept]
        self._fixed = sorted({*self._later, *range(encoded.kept)})
        """The ranges whose addresses have to be those of the plan."""
        self._fresh = [index for index in self._later if index >= encoded.kept]
        """The ranges that are copied later, and are not compared from save to save."""
        self._addresses = _find(encoded, self._fixed)
        self._addresses_of_fresh = _find(encoded, self._fresh)
        self._has_states_now = any(encoded.of_modules <= index < encoded.kept for index in now)
        self._mapping = 0
        self._turn = 0
        self._parts = parts
        self.later = _batches(encoded, self._later, parts, LARGE)
        self._kept_now = _batches(encoded, [index for index in now if index < encoded.kept], self._parts_now, 1)
        self.devices = {_device(tensor) for tensor in tensors}

    def fits(self, encoded: Encoded) -> bool:
        """Whether the plan fits a later state."""
        if self._layout is not encoded.layout:
            return False
        # Tensors that are copied later are compared by the copying thread.
        if encoded.same and (not self._has_states_now or encoded.same_state()):
            return self._addresses_of_fresh == _find(encoded, self._fresh)
        return self._addresses == _find(encoded, self._fixed)

    def follow(self, mapping: int) -> None:
        """Follow the file to its current mapping; in a new mapping the slots have other addresses."""
        if mapping != self._mapping:
            for _, batch in (*self.later, *self._kept_now):
                batch.forget_slots()
        self._mapping = mapping

    def now(self, encoded: Encoded) -> Pieces:
        """Batches of the tensors that are copied before training continues, e.g. states of generators."""
        return [*self._kept_now, *_batches(encoded, self._now, self._parts_now, 1)]

    @property
    def _parts_now(self) -> int:
        return 1 if self._later else self._parts

    def witness(self) -> Witness:
        """A witness of the tensors that are copied later, as they are now."""
        self._turn += 1
        return Witness(self._watched, self._probed, self._turn)


def _find(encoded: Encoded, chosen: Iterable[int]) -> tuple[list[int], list[Any]]:
    """Addresses and strides of some ranges."""
    tensors = [encoded.tensors[index] for index in chosen]
    return [tensor.data_ptr() for tensor in tensors], [tensor.stride() for tensor in tensors]


def _device(tensor: Tensor) -> str:
    """The device whose copier copies a tensor; the host's copier also copies from devices other than CUDA's."""
    return str(tensor.device) if tensor.is_cuda else HOST


def _batches(encoded: Encoded, chosen: Iterable[int], parts: int, large: int) -> Pieces:
    """Batches of the chosen tensors: for each device, ``parts`` batches with about the same number of bytes."""
    by_device: dict[str, list[tuple[Tensor, TensorSpec]]] = {}
    for index in chosen:
        tensor, spec = encoded.tensors[index], encoded.layout.specs[index]
        if spec.nbytes:
            by_device.setdefault(_device(tensor), []).append((tensor, spec))
    batches: Pieces = []
    # The host comes last, since copies on devices are only queued.
    for device, pairs in sorted(by_device.items(), key=lambda item: item[0] == HOST):
        total, done = sum(spec.nbytes for _, spec in pairs), 0
        cut: list[list[tuple[Tensor, TensorSpec]]] = [[] for _ in range(parts)]
        for tensor, spec in pairs:
            cut[done * parts // total].append((tensor, spec))
            done += spec.nbytes
        batches += [
            (device, Batch([tensor for tensor, _ in part], [spec for _, spec in part], large=large))
            for part in cut
            if part
        ]
    return batches
