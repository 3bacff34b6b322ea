"""State dicts to bytes and back: tensors apart, everything else in one small structure.

The structure is a pickle in which tensors are numbered references. It is read
with an unpickler that builds containers, numbers and strings only, so that a
checkpoint file can never run code; what it could not read back is refused when
it is saved, with the name of its type.
"""

from __future__ import annotations

import io
import pickle
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

from everstep.errors import CheckpointError, CorruptCheckpoint
from everstep.slot_format import aligned

_LENGTH = struct.Struct("<Q")
_PLAIN = {str, int, float, bool, type(None), dict, list, tuple, bytes}
_ALLOWED = {
    ("builtins", "bytearray"),
    ("builtins", "complex"),
    ("builtins", "float"),
    ("builtins", "int"),
    ("builtins", "bool"),
    ("builtins", "str"),
    ("builtins", "frozenset"),
    ("builtins", "set"),
    ("builtins", "list"),
    ("builtins", "dict"),
    ("builtins", "range"),
    ("builtins", "slice"),
    ("collections", "Counter"),
    ("collections", "OrderedDict"),
    ("collections", "defaultdict"),
    ("collections", "deque"),
    ("torch", "Size"),
}


class TensorSpec(NamedTuple):
    """Where one tensor's bytes are and what they mean."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    """Bytes from the beginning of the tensors."""
    nbytes: int
    device: str
    """Device type, e.g. ``cpu`` or ``cuda``."""


class Layout:
    """The places of the tensors of one state; kept from save to save while the tensors stay alike.

    Raises:
        CheckpointError: a tensor has no plain data.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.likeness = _likeness(tensors)
        self.specs: list[TensorSpec] = []
        end = 0
        for tensor in tensors:
            if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
                raise CheckpointError(
                    f"a state dict holds a {tensor.layout} tensor on {tensor.device}: only dense tensors are saved"
                )
            nbytes = tensor.numel() * tensor.element_size()
            dtype = str(tensor.dtype).removeprefix("torch.")
            self.specs.append(TensorSpec(dtype, tuple(tensor.shape), end, nbytes, tensor.device.type))
            end += aligned(nbytes)
        self.total_bytes = end
        self.encoded = pickle.dumps([tuple(spec) for spec in self.specs], protocol=5)

    def fits(self, tensors: Sequence[Tensor]) -> bool:
        """Whether tensors of a later save go to the same places."""
        return self.likeness == _likeness(tensors)


def _likeness(tensors: Sequence[Tensor]) -> list[tuple[Any, ...]]:
    return [(tensor.dtype, tensor.shape, tensor.device) for tensor in tensors]


@dataclass(frozen=True, slots=True)
class Encoded:
    """A state in parts: local tensors in the layout's order, and the structure."""

    tensors: list[Tensor]
    layout: Layout
    structure: bytes


def encode(tree: Mapping[str, Any], known: Layout | None = None) -> Encoded:
    """Take a tree of state dicts apart.

    Args:
        tree: Containers, numbers, strings, tensors (DTensors give their local
            shard) and numpy arrays, nested as one likes.
        known: The layout of the last save, used again when it still fits.

    Raises:
        CheckpointError: something else is in the tree.
    """
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    pickler.dump(tree)
    layout = known if known is not None and known.fits(pickler.tensors) else Layout(pickler.tensors)
    tail = buffer.getbuffer()
    return Encoded(pickler.tensors, layout, b"".join((_LENGTH.pack(len(layout.encoded)), layout.encoded, tail)))


def decode(structure: bytes, tensors: memoryview, meshes: Mapping[Any, Any]) -> Any:
    """Put a tree of state dicts together again.

    Args:
        structure: From ``encode``.
        tensors: The tensors' bytes. CPU tensors of the result are views of
            them: clone what is kept.
        meshes: Device meshes of this process by ``dtensors.mesh_key``, for DTensors.

    Raises:
        CorruptCheckpoint: the structure names something that no state dict holds.
    """
    (length,) = _LENGTH.unpack_from(structure)
    specs = [TensorSpec(*fields) for fields in _Unpickler(io.BytesIO(structure[8 : 8 + length]), None).load()]

    def tensor(index: int) -> Tensor:
        spec = specs[index]
        dtype = getattr(torch, spec.dtype)
        if not spec.nbytes:
            return torch.empty(spec.shape, dtype=dtype)
        raw = torch.frombuffer(tensors, dtype=torch.uint8, count=spec.nbytes, offset=spec.offset)
        return raw.view(dtype).view(spec.shape).to(spec.device)

    def find(reference: int | tuple[Any, ...]) -> Any:
        match reference:
            case int(index):
                return tensor(index)
            case ("array", index):
                return tensor(index).clone().numpy()
            case ("dtensor", index, description):
                from everstep.training.dtensors import rebuild

                return rebuild(tensor(index), description, meshes)
            case ("dtype", name):
                return getattr(torch, name)
            case ("device", name):
                return torch.device(name)
            case _:
                raise CorruptCheckpoint(f"a checkpoint's structure has an unknown reference {reference!r}")

    return _Unpickler(io.BytesIO(structure[8 + length :]), find).load()


class _Pickler(pickle.Pickler):
    """Replaces tensors by references and refuses what ``_Unpickler`` would not read."""

    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer, protocol=5)
        self.tensors: list[Tensor] = []

    def persistent_id(self, obj: Any) -> int | tuple[Any, ...] | None:
        # Called for every object of every save: the common kinds come first. A plain tensor is its number.
        kind = type(obj)
        if kind in _PLAIN:
            return None
        if kind is Tensor:
            return self._add(obj)
        if isinstance(obj, Tensor):
            return self._dtensor(obj) or self._add(obj)
        if isinstance(obj, numpy.ndarray):
            return ("array", self._add(_tensor_of(obj)))
        if kind in {torch.dtype, torch.device}:
            return (kind.__name__, str(obj).removeprefix("torch."))
        return None

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, numpy.generic):
            value = obj.item()
            return type(value), (value,)
        kind = obj if isinstance(obj, type) else type(obj)
        if (kind.__module__, kind.__qualname__) in _ALLOWED:
            return NotImplemented
        raise CheckpointError(
            f"a state dict holds {obj!r:.80} of type {kind.__module__}.{kind.__qualname__}, which cannot be saved: use "
            "tensors, arrays, numbers, strings, and lists, tuples and dicts of them"
        )

    def _add(self, tensor: Tensor) -> int:
        if tensor.dtype.is_complex:  # a lazily conjugated tensor's memory is not its value
            tensor = tensor.resolve_conj()
        self.tensors.append(tensor)
        return len(self.tensors) - 1

    def _dtensor(self, tensor: Tensor) -> tuple[Any, ...] | None:
        """Reference to a DTensor's local shard; None for a plain tensor."""
        if "torch.distributed.tensor" not in sys.modules:
            return None  # its import costs 0.4 s; a script that has not done it has no DTensors
        from torch.distributed.tensor import DTensor

        if not isinstance(tensor, DTensor):
            return None
        from everstep.training.dtensors import describe

        return ("dtensor", self._add(tensor._local_tensor), describe(tensor))


class _Unpickler(pickle.Unpickler):
    """Builds containers, numbers and strings, nothing else."""

    def __init__(self, buffer: io.BytesIO, find: Callable[[Any], Any] | None) -> None:
        super().__init__(buffer)
        self._find = find

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise CorruptCheckpoint(f"a checkpoint's structure names {module}.{name}, which no state dict holds")
        return super().find_class(module, name)

    def persistent_load(self, pid: Any) -> Any:
        if self._find is None:
            raise CorruptCheckpoint("a checkpoint's table of tensors refers to a tensor")
        return self._find(pid)


def _tensor_of(array: numpy.ndarray[Any, Any]) -> Tensor:
    """A numpy array's values as a tensor."""
    try:
        return torch.from_numpy(numpy.array(array, order="C"))
    except TypeError as error:
        raise CheckpointError(f"a state dict holds a numpy array of {array.dtype}: use an array of numbers") from error
