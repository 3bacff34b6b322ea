"""Splits state dicts into tensors and one small structure, and puts them together again.

The structure (``everstep/slots/tensor_table.py``) is a table of the tensors, and a pickle in which a tensor is
represented by its number. The unpickler builds only containers, numbers and strings, so that a checkpoint file can
never run code. A state with another type is refused when it is saved.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor

from everstep.errors import CheckpointError, CorruptCheckpoint
from everstep.slots.tensor_table import TensorSpec, split
from everstep.training.layout import SlotLayout, StateTensors, dtype_of, view_of

_LEAVES = {str, int, float, bool, type(None), bytes}
_CONTAINERS = (dict, list, tuple, deque, set, frozenset)
_NUMBERS = "biufc"
"""Kinds of numpy scalars that keep their type; as Python numbers they would have double precision."""
_PLAIN = {*_LEAVES, dict, list, tuple}
_ALLOWED = {
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


@dataclass(frozen=True, slots=True)
class Encoded:
    """A state in parts: its local tensors in the order of the layout, and the structure."""

    tensors: list[Tensor]
    layout: SlotLayout
    structure: bytes


def encode(tree: Mapping[str, Any], last: SlotLayout | None = None) -> Encoded:
    """Split a tree of state dicts.

    Args:
        tree: Nested containers of numbers, strings, tensors and numpy arrays; of a DTensor, the local shard is used.
        last: The layout of the last save, which is used again if it still fits.

    Raises:
        CheckpointError: the tree has an object of another type.
    """
    buffer, state = io.BytesIO(), StateTensors()
    _Pickler(buffer, state, _paths(tree)).dump(tree)
    layout = last if last is not None and last.fits(state) else SlotLayout(state)
    return Encoded(state.tensors, layout, layout.table + buffer.getvalue())


def decode(
    structure: bytes,
    tensors: memoryview,
    meshes: Mapping[Any, Any],
    make_dtensor: Callable[[int, Any], Tensor] | None = None,
    place: Callable[[TensorSpec], Tensor | None] | None = None,
) -> Any:
    """Put a tree of state dicts together again.

    Args:
        structure: The structure from ``encode``.
        tensors: The bytes of the tensors. CPU tensors of the result may be views of them, so the caller has to clone
            tensors that it keeps.
        meshes: Device meshes of this process by ``dtensors.mesh_key``, for DTensors.
        make_dtensor: Makes a DTensor from its number and its ``dtensors.Description``; None: DTensors are made from
            their saved local shards.
        place: Gives the tensor that replaces a saved tensor. If it gives None, or is None itself, the saved tensor is
            replaced by a view of ``tensors``, or by a copy on the saved tensor's kind of device.

    Raises:
        CorruptCheckpoint: the structure names something that no state dict contains.
    """
    specs, pickled = split(structure)

    def tensor(index: int) -> Tensor:
        spec = specs[index]
        placed = place(spec) if place is not None else None
        return placed if placed is not None else view_of(tensors, spec).to(spec.device)

    def find(reference: int | tuple[Any, ...]) -> Any:
        match reference:
            case int(index):
                return tensor(index)
            case ("array", index):
                return view_of(tensors, specs[index]).clone().numpy()
            case ("dtensor", index, description):
                if make_dtensor is not None:
                    return make_dtensor(index, description)
                from everstep.training.dtensors import rebuild

                return rebuild(tensor(index), description, meshes)
            case _:
                return _value(reference)

    return _Unpickler(io.BytesIO(pickled), find).load()


class _Pickler(pickle.Pickler):
    """Replaces tensors by references, and refuses objects that ``_Unpickler`` would not read."""

    def __init__(self, buffer: io.BytesIO, state: StateTensors, paths: Mapping[int, str]) -> None:
        super().__init__(buffer, protocol=5)
        self._state = state
        self._paths = paths

    def persistent_id(self, obj: Any) -> int | tuple[Any, ...] | None:
        # This is called for every object of every save, so the common kinds come first.
        kind = type(obj)
        if kind in _PLAIN:
            return None
        if kind is Tensor:
            return self._add(obj, obj)
        if isinstance(obj, Tensor):
            return self._dtensor(obj) or self._add(obj, obj)
        if isinstance(obj, numpy.ndarray):
            return ("array", self._add(obj, _tensor_of(obj)))
        return _named(obj)

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, numpy.generic):
            value = obj.item()
            return type(value), (value,)
        kind = obj if isinstance(obj, type) else type(obj)
        if (kind.__module__, kind.__qualname__) in _ALLOWED:
            return NotImplemented
        raise CheckpointError(
            f"a state dict has {obj!r:.80} of type {kind.__module__}.{kind.__qualname__}, which cannot be saved: use "
            "tensors, arrays, numbers, strings, and lists, tuples and dicts of them"
        )

    def _add(self, obj: Any, tensor: Tensor) -> int:
        if tensor.is_conj() or tensor.is_neg():  # a lazily conjugated tensor's memory is not its value
            tensor = tensor.resolve_conj().resolve_neg()
        tensors = self._state.tensors
        tensors.append(tensor)
        self._state.names.append(self._paths.get(id(obj), "tensor"))
        return len(tensors) - 1

    def _dtensor(self, tensor: Tensor) -> tuple[Any, ...] | None:
        """Reference to a DTensor's local shard; None for a plain tensor."""
        if "torch.distributed.tensor" not in sys.modules:
            return None  # a script that did not import it has no DTensors; the import would take 0.4 s
        from torch.distributed.tensor import DTensor

        if not isinstance(tensor, DTensor):
            return None
        from everstep.training.dtensors import describe

        description = describe(tensor)
        index = self._add(tensor, tensor._local_tensor)
        self._state.dtensors[index] = tensor, description
        return ("dtensor", index, description)


class _Unpickler(pickle.Unpickler):
    """Builds only containers, numbers and strings."""

    def __init__(self, buffer: io.BytesIO, find: Callable[[Any], Any]) -> None:
        super().__init__(buffer)
        self._find = find

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise CorruptCheckpoint(f"a checkpoint's structure names {module}.{name}, which no state dict holds")
        return super().find_class(module, name)

    def persistent_load(self, pid: Any) -> Any:
        return self._find(pid)


def _tensor_of(array: numpy.ndarray[Any, Any]) -> Tensor:
    """A numpy array's values as a tensor."""
    try:
        return torch.from_numpy(numpy.array(array, order="C"))
    except TypeError as error:
        raise CheckpointError(f"a state dict has a numpy array of {array.dtype}: use an array of numbers") from error


def _named(obj: Any) -> tuple[Any, ...] | None:
    """Reference to a numpy scalar, a type or a device of torch; None: pickle keeps the object as it is."""
    if isinstance(obj, numpy.generic) and obj.dtype.kind in _NUMBERS:
        return ("number", obj.dtype.str, obj.tobytes())
    if isinstance(obj, torch.dtype | torch.device):
        return (type(obj).__name__, str(obj).removeprefix("torch."))
    return None


def _value(reference: tuple[Any, ...]) -> Any:
    """The object of a reference from ``_named``, which is checked, since the structure is not trusted."""
    match reference:
        case ("number", name, data):
            kind = numpy.dtype(name)
            if kind.kind not in _NUMBERS or len(data) != kind.itemsize:
                raise CorruptCheckpoint(f"a checkpoint's structure has {name!r} as the type of a number")
            return numpy.frombuffer(data, kind)[0]
        case ("dtype", name):
            return dtype_of(name)
        case ("device", name):
            return torch.device(name)
        case _:
            raise CorruptCheckpoint(f"a checkpoint's structure has an unknown reference {reference!r}")


def _paths(tree: Any) -> dict[int, str]:
    """Id of every tensor and array in a tree → its first path."""
    paths: dict[int, str] = {}
    seen: set[int] = set()

    def walk(node: Any, prefix: str) -> None:
        if id(node) in seen:
            return
        seen.add(id(node))
        items: Iterable[tuple[Any, Any]] = node.items() if isinstance(node, dict) else enumerate(node)
        for key, value in items:
            kind = type(value)
            if kind is Tensor:
                paths.setdefault(id(value), f"{prefix}{key}")
            elif kind in _LEAVES:
                continue
            elif isinstance(value, Tensor | numpy.ndarray):
                paths.setdefault(id(value), f"{prefix}{key}")
            elif isinstance(value, _CONTAINERS):
                walk(value, f"{prefix}{key}.")

    walk(tree, "")
    return paths
