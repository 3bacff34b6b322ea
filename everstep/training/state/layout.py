"""Computes the layout of a slot: which ranges of memory are saved at which offsets, and how the state's tensors show
them.

Tensors that share memory are saved once, and share memory again after a restore. Every tensor gets its strides back:
kernels choose their way by the strides, and so do the sums that they compute.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from everstep.errors import CheckpointError, CorruptCheckpoint
from everstep.slots.format import aligned
from everstep.slots.tensor_table import TensorSpec, TensorView, pack_table
from everstep.training.state.subclasses import is_wrapper

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of an element → a type of which torch copies tensors with any strides."""
_QUANTIZED = {torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4}


@dataclass(slots=True)
class StateTensors:
    """The tensors of a tree; their positions are their numbers, from ``first`` on."""

    first: int = 0
    tensors: list[Tensor] = field(default_factory=list)
    """The saved tensors; for a DTensor, its local shard."""
    names: list[str] = field(default_factory=list)
    dtensors: dict[int, tuple[Any, Any]] = field(default_factory=dict)
    """Number of a DTensor → the DTensor, and its description in plain values."""


class Range(NamedTuple):
    """A range of memory that several tensors share, or one tensor with itself."""

    tensor: int
    """Number of a tensor that has its data there."""
    begin: int
    """The first byte, from the beginning of the storage on."""
    bytes: int
    dtype: torch.dtype
    """The type as which it is saved."""


Source = int | Range
"""What is saved as a range of the slot: the tensor with a number, or a range of memory."""


class SlotLayout:
    """The ranges of a state, and the tensors that show them.

    A layout is used again while the tensors keep their names, types, shapes and strides, and share memory as before.

    Raises:
        CheckpointError: a tensor is not dense, or shares memory in a way that cannot be saved.
    """

    def __init__(self, state: StateTensors) -> None:
        self.specs: list[TensorSpec] = []
        self.views: list[TensorView] = []
        for tensor in state.tensors:
            _refuse(tensor)
        self._names = state.names
        self._forms = _forms(state.tensors)
        self._descriptions = _descriptions(state)
        self._shared = _shared(state.tensors)
        self._addresses = _addresses(state.tensors)
        views: dict[int, TensorView] = {}
        self._sources: list[Source] = []
        taken: set[str] = set()
        end = 0
        for number in range(len(state.tensors)):
            if number in views:
                continue
            members = next((group for group in self._shared if number in group), (number,))
            source = _source(state, members)
            base = _base(state.tensors, source)
            views |= {member: _view(state.tensors[member], base, len(self._sources)) for member in members}
            self._sources.append(source)
            nbytes = base.numel() * base.element_size()
            name = _unique(state.names[number], taken)
            spec = TensorSpec(name, _name(base.dtype), tuple(base.shape), end, nbytes, base.device.type)
            chunk = number in state.dtensors and isinstance(source, int)
            self.specs.append(spec._replace(**_chunk(state.dtensors[number][0])) if chunk else spec)
            end += aligned(nbytes)
        self.views = [views[number] for number in range(len(state.tensors))]
        self.total_bytes = end
        self.table = pack_table(self.specs, self.views)

    def fits(self, state: StateTensors) -> bool:
        """Whether the tensors of a later save have the same ranges and names."""
        if (
            self._names != state.names
            or self._forms != _forms(state.tensors)
            or self._descriptions != _descriptions(state)
        ):
            return False
        addresses = _addresses(state.tensors)
        if addresses != self._addresses:
            if _shared(state.tensors) != self._shared:
                return False
            self._addresses = addresses
        return True

    def fits_from(self, first: int, at: int, state: StateTensors) -> bool:
        """Whether other tensors can take the places of those from number ``first``, whose ranges begin at index ``at``.

        They need the same names and forms, and ranges of their own.
        """
        return (
            self._sources[at:] == [*range(first, first + len(state.tensors))]
            and self._names[first:] == state.names
            and self._forms[first:] == _forms(state.tensors)
            and not state.dtensors
            and not any(number >= first for number in self._descriptions)
            and not _shared(state.tensors)
        )

    def ranges_before(self, first: int) -> int:
        """Number of ranges of the tensors before number ``first``."""
        return sum(1 for source in self._sources if (source if isinstance(source, int) else source.tensor) < first)

    def ranges(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The ranges of a state that fits, in the order of the table, as tensors that share its memory."""
        return [_base(tensors, source) for source in self._sources]


def show(base: Tensor, view: TensorView) -> Tensor:
    """The tensor that shows a range which it shares."""
    dtype = dtype_of(view.dtype)
    offset = base.storage_offset() * base.element_size() + (view.offset or 0)
    shown = torch.empty(0, dtype=dtype, device=base.device)
    return shown.set_(base.detach().untyped_storage(), offset // dtype.itemsize, view.shape, view.strides)


def arranged(values: Tensor, view: TensorView) -> Tensor:
    """A copy of a tensor with the strides of a view."""
    copy = torch.empty_strided(values.shape, view.strides, dtype=values.dtype, device=values.device)
    as_integers(copy).copy_(as_integers(values))
    return copy


def as_integers(tensor: Tensor) -> Tensor:
    """A tensor as a view of integers with the same bytes, since torch cannot copy all types with all strides."""
    dtype = _INTEGERS.get(tensor.element_size())
    return tensor if dtype is None or tensor.is_complex() else tensor.detach().view(dtype)


def view_of(memory: memoryview, spec: TensorSpec) -> Tensor:
    """A range as a view of memory, at the offset of its table entry.

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


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _refuse(tensor: Tensor) -> None:
    dense = not tensor.is_nested and tensor.layout is torch.strided and not is_wrapper(tensor)
    quantized = tensor.is_quantized or tensor.dtype in _QUANTIZED
    if not dense or quantized or tensor.is_meta or isinstance(tensor, UninitializedParameter | UninitializedBuffer):
        kind = "nested" if tensor.is_nested else "quantized" if quantized else tensor.layout
        raise CheckpointError(
            f"a state dict has a {kind} {type(tensor).__name__} on {tensor.device}: only dense and sparse tensors can "
            "be saved"
        )


def _forms(tensors: Sequence[Tensor]) -> list[Any]:
    return [(tensor.dtype, tensor.shape, tensor.stride(), tensor.device) for tensor in tensors]


def _addresses(tensors: Sequence[Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


def _descriptions(state: StateTensors) -> dict[int, Any]:
    return {index: description for index, (_, description) in state.dtensors.items()}


def _reach(tensor: Tensor) -> int:
    """Number of elements from a tensor's first to its last in memory."""
    if not tensor.numel():
        return 0
    return sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1


def overlaps_itself(tensor: Tensor) -> bool:
    """Whether elements of a tensor share memory, e.g. since it was expanded."""
    repeated = any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return repeated or _reach(tensor) < tensor.numel()


def _shared(tensors: Sequence[Tensor]) -> list[tuple[int, ...]]:
    """The numbers of tensors whose memory overlaps, in groups; tensors that share nothing are left out."""
    storages: dict[tuple[Any, int], list[int]] = {}
    for number, tensor in enumerate(tensors):
        if tensor.numel():
            storages.setdefault(storage_of(tensor), []).append(number)
    return [group for numbers in storages.values() if len(numbers) > 1 for group in _overlapping(tensors, numbers)]


def storage_of(tensor: Tensor) -> tuple[Any, int]:
    """Device and address of a tensor's storage."""
    return tensor.device, tensor.untyped_storage().data_ptr()


def _overlapping(tensors: Sequence[Tensor], numbers: Sequence[int]) -> Iterator[tuple[int, ...]]:
    group: list[int] = []
    reached = 0
    for number in sorted(numbers, key=lambda number: tensors[number].data_ptr()):
        begin, end = _range(tensors[number])
        if group and begin >= reached:
            if len(group) > 1:
                yield tuple(sorted(group))
            group, reached = [], 0
        group.append(number)
        reached = max(reached, end)
    if len(group) > 1:
        yield tuple(sorted(group))


def _range(tensor: Tensor) -> tuple[int, int]:
    """The addresses of a tensor's first byte and of the byte after its last one."""
    begin = tensor.data_ptr()
    return begin, begin + _reach(tensor) * tensor.element_size()


def _source(state: StateTensors, members: Sequence[int]) -> Source:
    """What is saved for tensors that share memory, or for one tensor."""
    tensors = [state.tensors[number] for number in members]
    described = [state.dtensors[number][1] for number in members if number in state.dtensors]
    same = all(_form(tensor) == _form(tensors[0]) for tensor in tensors)
    if described and not (same and described == described[:1] * len(members)):
        names = " and ".join(state.names[number] for number in members[:2])
        raise CheckpointError(
            f"{names} share memory, and one of them is a DTensor, which cannot be saved: keep a clone in one of them"
        )
    if same and not overlaps_itself(tensors[0]):
        return members[0]
    ranges = [_range(tensor) for tensor in tensors]
    begin, end = min(begin for begin, _ in ranges), max(end for _, end in ranges)
    for number, tensor, reach in zip(members, tensors, ranges, strict=True):
        if reach == (begin, end) and tensor.is_contiguous():
            return number
    dtype = tensors[0].dtype
    if any(
        tensor.dtype != dtype or (at - begin) % dtype.itemsize for tensor, (at, _) in zip(tensors, ranges, strict=True)
    ):
        dtype = torch.uint8
    return Range(members[0], begin - tensors[0].untyped_storage().data_ptr(), end - begin, dtype)


def _base(tensors: Sequence[Tensor], source: Source) -> Tensor:
    """The tensor that is saved for a source."""
    if isinstance(source, int):
        return tensors[source]
    tensor, dtype = tensors[source.tensor].detach(), source.dtype
    base = torch.empty(0, dtype=dtype, device=tensor.device)
    return base.set_(tensor.untyped_storage(), source.begin // dtype.itemsize, (source.bytes // dtype.itemsize,), (1,))


def _view(tensor: Tensor, base: Tensor, index: int) -> TensorView:
    """How a tensor shows the range ``index``, which is saved from ``base``."""
    dtype, shape, strides, begin = _form(tensor)
    if (dtype, shape, begin) == (base.dtype, base.shape, base.data_ptr()):
        if strides == torch.empty(shape, device="meta").stride():
            return TensorView(index)
        if not base.is_contiguous():
            return TensorView(index, _name(dtype), tuple(shape), strides)
    return TensorView(index, _name(dtype), tuple(shape), strides, begin - base.data_ptr())


def _form(tensor: Tensor) -> tuple[torch.dtype, torch.Size, tuple[int, ...], int]:
    """Type, shape, strides and address of a tensor."""
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.data_ptr()


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
    from everstep.training.state.dtensors import chunk_of

    return {key: tuple(value) if isinstance(value, list) else value for key, value in chunk_of(dtensor).items()}
