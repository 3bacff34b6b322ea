"""Where the tensors of a state lie in a slot, and the table that says so."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from everstep.errors import CheckpointError, CorruptCheckpoint
from everstep.slots.format import aligned
from everstep.slots.tensor_table import TensorSpec, pack_table


@dataclass(slots=True)
class Found:
    """The tensors of a tree by their number."""

    tensors: list[Tensor] = field(default_factory=list)
    """What is saved: the local shards of DTensors."""
    names: list[str] = field(default_factory=list)
    wholes: dict[int, tuple[Any, Any]] = field(default_factory=dict)
    """The DTensors among them, each with all of it but its shard in plain values."""


class SlotLayout:
    """The places of the tensors of one state; kept from save to save while the tensors stay alike.

    Raises:
        CheckpointError: a tensor has no plain data.
    """

    def __init__(self, found: Found) -> None:
        self.specs: list[TensorSpec] = []
        self._names = found.names
        self._kinds = [(tensor.dtype, tensor.shape, tensor.device) for tensor in found.tensors]
        self._descriptions = _descriptions(found)
        end = 0
        taken: set[str] = set()
        for index, (tensor, name) in enumerate(zip(found.tensors, found.names, strict=True)):
            dense = tensor.layout is torch.strided and not hasattr(type(tensor), "__tensor_flatten__")
            if not dense or tensor.is_quantized or tensor.is_meta:
                raise CheckpointError(
                    f"a state dict holds a {tensor.layout} {type(tensor).__name__} on {tensor.device}: "
                    "only dense tensors are saved"
                )
            nbytes = tensor.numel() * tensor.element_size()
            dtype = str(tensor.dtype).removeprefix("torch.")
            spec = TensorSpec(_unique(name, taken), dtype, tuple(tensor.shape), end, nbytes, tensor.device.type)
            self.specs.append(spec._replace(**_chunk(found.wholes[index][0])) if index in found.wholes else spec)
            end += aligned(nbytes)
        self.total_bytes = end
        self.table = pack_table(self.specs)

    def fits(self, found: Found) -> bool:
        """Whether tensors of a later save go to the same places under the same names."""
        return (
            self._names == found.names
            and self._descriptions == _descriptions(found)
            and all(
                tensor.dtype is dtype and tensor.shape == shape and tensor.device == device
                for tensor, (dtype, shape, device) in zip(found.tensors, self._kinds, strict=True)
            )
        )


def view_of(memory: memoryview, spec: TensorSpec) -> Tensor:
    """A tensor that lies at its offset in some memory.

    Raises:
        CorruptCheckpoint: it has no type that there is.
        RuntimeError, ValueError: its size is not that of its shape, or the memory ends before it.
    """
    dtype = dtype_of(spec.dtype)
    if not spec.nbytes:  # torch makes no tensor of an empty buffer
        return torch.empty(0, dtype=dtype).view(spec.shape)
    raw = torch.frombuffer(memory, dtype=torch.uint8, count=spec.nbytes, offset=spec.offset)
    return raw.view(dtype).view(spec.shape)


def dtype_of(name: str) -> torch.dtype:
    """The type of that name; nothing else of torch, which has functions that write files.

    Raises:
        CorruptCheckpoint: it is none.
    """
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise CorruptCheckpoint(f"a checkpoint names {name!r:.60} as the type of a tensor")
    return found


def _descriptions(found: Found) -> dict[int, Any]:
    return {index: description for index, (_, description) in found.wholes.items()}


def _unique(name: str, taken: set[str]) -> str:
    """A name that no tensor before has."""
    found, count = name, 1
    while found in taken:
        count += 1
        found = f"{name}.{count}"
    taken.add(found)
    return found


def _chunk(whole: Any) -> dict[str, Any]:
    """Fields of the table that say which chunk of a DTensor is saved."""
    if whole is None:
        return {}
    from everstep.training.dtensors import chunk_of

    return {key: tuple(value) if isinstance(value, list) else value for key, value in chunk_of(whole).items()}
