"""Computes the layout of a slot: the offsets of a state's tensors, and the table that describes them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from everstep.errors import CheckpointError, CorruptCheckpoint
from everstep.slots.format import aligned
from everstep.slots.tensor_table import TensorSpec, pack_table


@dataclass(slots=True)
class StateTensors:
    """The tensors of a tree; their positions are their numbers."""

    tensors: list[Tensor] = field(default_factory=list)
    """The saved tensors; for a DTensor, its local shard."""
    names: list[str] = field(default_factory=list)
    dtensors: dict[int, tuple[Any, Any]] = field(default_factory=dict)
    """Number of a DTensor → the DTensor, and its description in plain values."""


class SlotLayout:
    """The offsets of a state's tensors. A layout is used again while the tensors keep their names, types and shapes.

    Raises:
        CheckpointError: a tensor is not dense.
    """

    def __init__(self, state: StateTensors) -> None:
        self.specs: list[TensorSpec] = []
        self._names = state.names
        self._kinds = [(tensor.dtype, tensor.shape, tensor.device) for tensor in state.tensors]
        self._descriptions = _descriptions(state)
        end = 0
        taken: set[str] = set()
        for index, (tensor, name) in enumerate(zip(state.tensors, state.names, strict=True)):
            dense = tensor.layout is torch.strided and not hasattr(type(tensor), "__tensor_flatten__")
            if not dense or tensor.is_quantized or tensor.is_meta:
                raise CheckpointError(
                    f"a state dict has a {tensor.layout} {type(tensor).__name__} on {tensor.device}: "
                    "only dense tensors can be saved"
                )
            nbytes = tensor.numel() * tensor.element_size()
            dtype = str(tensor.dtype).removeprefix("torch.")
            spec = TensorSpec(_unique(name, taken), dtype, tuple(tensor.shape), end, nbytes, tensor.device.type)
            self.specs.append(spec._replace(**_chunk(state.dtensors[index][0])) if index in state.dtensors else spec)
            end += aligned(nbytes)
        self.total_bytes = end
        self.table = pack_table(self.specs)

    def fits(self, state: StateTensors) -> bool:
        """Whether the tensors of a later save have the same offsets and names."""
        return (
            self._names == state.names
            and self._descriptions == _descriptions(state)
            and all(
                tensor.dtype is dtype and tensor.shape == shape and tensor.device == device
                for tensor, (dtype, shape, device) in zip(state.tensors, self._kinds, strict=True)
            )
        )


def view_of(memory: memoryview, spec: TensorSpec) -> Tensor:
    """A tensor as a view of memory, at the offset of its table entry.

    Raises:
        CorruptCheckpoint: the tensor's type does not exist.
        RuntimeError, ValueError: the size does not fit the shape, or the memory is too short.
    """
    dtype = dtype_of(spec.dtype)
    if not spec.nbytes:  # torch makes no tensor of an empty buffer
        return torch.empty(0, dtype=dtype).view(spec.shape)
    raw = torch.frombuffer(memory, dtype=torch.uint8, count=spec.nbytes, offset=spec.offset)
    return raw.view(dtype).view(spec.shape)


def dtype_of(name: str) -> torch.dtype:
    """The type of torch that has a name. Names of other objects are refused: torch has functions that write files.

    Raises:
        CorruptCheckpoint: there is no such type.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CorruptCheckpoint(f"a checkpoint names {name!r:.60} as the type of a tensor")
    return dtype


def _descriptions(state: StateTensors) -> dict[int, Any]:
    return {index: description for index, (_, description) in state.dtensors.items()}


def _unique(name: str, taken: set[str]) -> str:
    """The name, with a number at its end if an earlier tensor has the same name."""
    unique, count = name, 1
    while unique in taken:
        count += 1
        unique = f"{name}.{count}"
    taken.add(unique)
    return unique


def _chunk(dtensor: Any) -> dict[str, Any]:
    """Fields of the table for the saved chunk of a DTensor."""
    if dtensor is None:
        return {}
    from everstep.training.dtensors import chunk_of

    return {key: tuple(value) if isinstance(value, list) else value for key, value in chunk_of(dtensor).items()}
