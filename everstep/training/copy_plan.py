"""Plans a copy into a slot: which tensors are copied at once and which later, in batches for each device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from everstep.slots.tensor_table import TensorSpec
from everstep.training.codec import Encoded
from everstep.training.copier import LARGE, Batch
from everstep.training.overlap import Witness, classify, probes

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
        later, self._watched = classify(things, tensors, specs) if overlap else ([False] * len(tensors), [])
        self._probed = probes(tensors, specs, later)
        self._layout = encoded.layout
        self._later = [index for index, is_later in enumerate(later) if is_later]
        self._now = [index for index, is_later in enumerate(later) if not is_later]
        self._addresses = self._find(encoded)
        self._mapping = 0
        self._parts = parts
        self.later = _batches(encoded, self._later, parts, LARGE)
        self.devices = {_device(tensor) for tensor in tensors}

    def fits(self, encoded: Encoded) -> bool:
        """Whether the plan fits a later state."""
        return self._layout is encoded.layout and self._addresses == self._find(encoded)

    def follow(self, mapping: int) -> None:
        """Follow the file to its current mapping; in a new mapping the slots have other addresses."""
        if mapping != self._mapping:
            for _, batch in self.later:
                batch.forget_slots()
        self._mapping = mapping

    def now(self, encoded: Encoded) -> Pieces:
        """Batches of the tensors that are copied before training continues, e.g. states of generators."""
        return _batches(encoded, self._now, 1 if self._later else self._parts, 1)

    def witness(self) -> Witness:
        """A witness of the tensors that are copied later, as they are now."""
        return Witness(self._watched, self._probed)

    def _find(self, encoded: Encoded) -> tuple[list[int], list[Any]]:
        """Addresses and strides of the tensors that are copied later."""
        tensors = [encoded.tensors[index] for index in self._later]
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
