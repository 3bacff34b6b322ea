"""Splits state dicts into tensors and one small structure, and puts them together again.

The structure (``everstep/slots/tensor_table.py``) is a table of the tensors, and a pickle in which a tensor is
represented by its number. The unpickler builds only containers, numbers and strings, and tensors of classes that the
script has imported itself. So a checkpoint file can never run code of its own. A state with another type is refused
when it is saved.
"""

from __future__ import annotations

import io
import pickle
import struct
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from everstep.errors import CheckpointError, CorruptCheckpoint
from everstep.slots.tensor_table import Structure, TensorSpec, TensorView, split
from everstep.training.state.layout import SlotLayout, StateTensors, arranged, dtype_of, show, view_of
from everstep.training.state.subclasses import class_name, class_of, is_wrapper

_LEAVES = {str, int, float, bool, type(None), bytes}
_CONTAINERS = (dict, list, tuple, deque, set, frozenset)
_NUMBERS = "biufcmM"
"""Kinds of numpy scalars that keep their type; as Python numbers they would have double precision."""
_COMPRESSED = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}
"""Layout of sparse tensors → the methods that give their indices."""
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


_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Encoded:
    """A state in parts: the ranges of its tensors in the order of the layout, and the structure."""

    tensors: list[Tensor]
    layout: SlotLayout
    trees: tuple[bytes, ...]
    """The tree of the structure, in pieces."""
    kept: int = 0
    """Number of ranges at the beginning that are tensors of objects which are compared from save to save."""
    of_modules: int = 0
    """Number of ranges at the beginning that are tensors of modules."""
    same: bool = False
    """Whether the ranges of the modules are the same memory as at the last save with this layout."""
    same_state: Callable[[], bool] = bool
    """Whether, if ``same``, the other kept ranges are the same too. It takes time, and may be asked in any thread."""

    @property
    def pieces(self) -> tuple[bytes, ...]:
        """The structure in pieces, which are not joined, since they may have some MB."""
        return self.layout.table, *self.trees

    @property
    def structure(self) -> bytes:
        """The structure."""
        return b"".join(self.pieces)


@dataclass(frozen=True, slots=True)
class FreshValue:
    """A number or text in the kept part of a tree. It is saved apart, since it changes from save to save."""

    index: int


def encode(tree: Mapping[str, Any], last: SlotLayout | None = None) -> Encoded:
    """Split a tree of state dicts.

    Args:
        tree: Nested containers of numbers, strings, tensors and numpy arrays; of a DTensor, the local shard is used.
            Tensors that share memory share it after ``decode``, and tensors keep their strides.
        last: The layout of the last save, which is used again if it still fits.

    Raises:
        CheckpointError: the tree has an object of another type.
    """
    state = StateTensors()
    pickled = pack_tree(pickle_tree({}, StateTensors()), pickle_tree((tree, []), state, tree))
    layout = last if last is not None and last.fits(state) else SlotLayout(state)
    return Encoded(layout.ranges(state.tensors), layout, pickled)


def pickle_tree(tree: Any, state: StateTensors, named: Mapping[str, Any] | None = None) -> bytes:
    """Pickle a tree, and add its tensors to a state.

    Args:
        tree: The tree.
        state: The tensors that are pickled so far.
        named: The part of the tree that gives tensors their names; None: all of it.

    Raises:
        CheckpointError: the tree has an object of another type than those of ``encode``.
    """
    buffer = io.BytesIO()
    _Pickler(buffer, state, _paths(tree if named is None else named)).dump(tree)
    return buffer.getvalue()


def pack_tree(kept: bytes, fresh: bytes) -> tuple[bytes, ...]:
    """The tree of a structure in pieces, from two pickles.

    Args:
        kept: Names of objects and their state dicts, in which each ``FreshValue`` stands for a value of ``fresh``.
        fresh: The other objects, and the list of the values.
    """
    return _LENGTH.pack(len(kept)), kept, fresh


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
        make_dtensor: Makes a DTensor from the index of its range and its ``dtensors.Description``; None: DTensors are
            made from their saved local shards.
        place: Gives the tensor that replaces a saved tensor. If it gives None, or is None itself, the saved tensor is
            replaced by a view of ``tensors``, or by a copy on the saved tensor's kind of device.

    Raises:
        CorruptCheckpoint: the structure names something that no state dict contains.
    """
    decoder = _Decoder(split(structure), tensors, meshes, make_dtensor, place)
    (length,) = _LENGTH.unpack_from(decoder.tree)
    buffer = io.BytesIO(decoder.tree)
    buffer.seek(_LENGTH.size + length)
    fresh, decoder.leaves = _Unpickler(buffer, decoder.find).load()
    buffer.seek(_LENGTH.size)
    return _Unpickler(buffer, decoder.find).load() | fresh


class _Decoder:
    """Makes the objects that references stand for; see ``decode``."""

    def __init__(
        self,
        structure: Structure,
        tensors: memoryview,
        meshes: Mapping[Any, Any],
        make_dtensor: Callable[[int, Any], Tensor] | None,
        place: Callable[[TensorSpec], Tensor | None] | None,
    ) -> None:
        self._specs, self._views, self.tree = structure
        self._memory, self._meshes = tensors, meshes
        self._make_dtensor, self._place = make_dtensor, place
        self.leaves: list[Any] = []
        self._ranges: dict[int, Tensor] = {}
        self._shown: dict[TensorView, Tensor] = {}
        self._makers: dict[str, Callable[..., Any]] = {
            "leaf": lambda index: self.leaves[index],
            "array": self._array,
            "dtensor": self._dtensor,
            "parameter": lambda inner: torch.nn.Parameter(self.find(inner)),
            "requires grad": lambda inner: self.find(inner).detach().requires_grad_(),
            "sparse": self._sparse,
            "wrapper": self._wrapper,
            "subclass": self._subclass,
        }

    def find(self, reference: Any) -> Any:
        """The object of a reference from ``_Pickler``."""
        if isinstance(reference, int):
            return self._tensor(reference)
        make = self._makers.get(reference[0])
        return make(*reference[1:]) if make is not None else _value(reference)

    def _tensor(self, number: int) -> Tensor:
        view = self._views[number]
        if view not in self._shown:
            if not view.dtype:
                self._shown[view] = self._range(view.tensor)
            elif view.offset is None:
                self._shown[view] = arranged(self._saved(view.tensor), view)
            else:
                self._shown[view] = show(self._range(view.tensor), view)
        return self._shown[view]

    def _range(self, index: int) -> Tensor:
        if index not in self._ranges:
            placed = self._place(self._specs[index]) if self._place is not None else None
            self._ranges[index] = placed if placed is not None else self._saved(index)
        return self._ranges[index]

    def _saved(self, index: int) -> Tensor:
        spec = self._specs[index]
        return view_of(self._memory, spec).to(spec.device)

    def _dtensor(self, reference: Any, description: Any) -> Tensor:
        if self._make_dtensor is not None and isinstance(reference, int):
            return self._make_dtensor(self._views[reference].tensor, description)
        from everstep.training.state.dtensors import rebuild

        return rebuild(self.find(reference), description, self._meshes)

    def _array(self, number: int, descr: Any, shape: tuple[int, ...], order: str) -> numpy.ndarray[Any, Any]:
        """A numpy array from its saved values, or, if its type has a description, from its saved bytes."""
        array: numpy.ndarray[Any, Any] = view_of(self._memory, self._specs[self._views[number].tensor]).clone().numpy()
        if descr is not None:
            kind = numpy.lib.format.descr_to_dtype(descr)
            if kind.hasobject:
                raise CorruptCheckpoint(f"a checkpoint's structure has {descr!r:.60} as the type of an array")
            array = array.view(kind).reshape(shape)
        return array.T if order == "F" else array

    def _sparse(self, parts: list[Any], layout: str, shape: tuple[int, ...], coalesced: bool) -> Tensor:
        kind = getattr(torch, layout, None)
        dense = [self.find(part) for part in parts]
        if kind is torch.sparse_coo:
            indices, values = dense
            return torch.sparse_coo_tensor(indices, values, shape, is_coalesced=coalesced, check_invariants=False)
        if kind not in _COMPRESSED:
            raise CorruptCheckpoint(f"a checkpoint names {layout!r:.60} as the layout of a tensor")
        rows, columns, values = dense
        return torch.sparse_compressed_tensor(rows, columns, values, shape, layout=kind, check_invariants=False)

    def _wrapper(self, name: tuple[str, str], parts: list[Any], context: Any, size: tuple[Any, Any]) -> Any:
        kind: Any = class_of(*name)
        return kind.__tensor_unflatten__({key: self.find(part) for key, part in parts}, context, *size)

    def _subclass(self, name: tuple[str, str], reference: Any, attributes: dict[str, Any]) -> Tensor:
        made: Tensor = self.find(reference).as_subclass(class_of(*name))
        vars(made).update(attributes)
        return made


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
        if kind is Tensor or isinstance(obj, Tensor):
            return self._tensor(obj, self._paths.get(id(obj), "tensor"))
        if isinstance(obj, numpy.ndarray):
            return self._array(obj)
        return ("leaf", obj.index) if kind is FreshValue else _named(obj)

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

    def _tensor(self, tensor: Tensor, name: str) -> int | tuple[Any, ...]:
        """Reference to a tensor, whose dense parts are added to the state."""
        kind = type(tensor)
        if tensor.requires_grad and kind is not torch.nn.Parameter:
            return ("requires grad", self._tensor(tensor.detach(), name))
        if kind is not Tensor:
            return self._of_class(tensor, name)
        if tensor.layout is torch.sparse_coo:
            inner = {"indices": tensor._indices(), "values": tensor._values()}
        elif tensor.layout is not torch.strided and tensor.layout in _COMPRESSED:
            rows, columns = _COMPRESSED[tensor.layout]
            inner = {rows: getattr(tensor, rows)(), columns: getattr(tensor, columns)(), "values": tensor.values()}
        else:
            return self._add(tensor, name)
        parts = [self._tensor(part, f"{name}.{key}") for key, part in inner.items()]
        coalesced = tensor.layout is torch.sparse_coo and tensor.is_coalesced()
        return ("sparse", parts, str(tensor.layout).removeprefix("torch."), tuple(tensor.shape), coalesced)

    def _of_class(self, tensor: Tensor, name: str) -> int | tuple[Any, ...]:
        """Reference to a tensor of a subclass."""
        if type(tensor) is torch.nn.Parameter:
            plain = self._tensor(tensor.detach(), name)
            return ("parameter", plain) if tensor.requires_grad else plain
        if (dtensor := self._dtensor(tensor, name)) is not None:
            return dtensor
        if tensor.is_nested or isinstance(tensor, UninitializedParameter | UninitializedBuffer):
            return self._add(tensor, name)  # the layout refuses it
        if not is_wrapper(tensor):
            return ("subclass", class_name(tensor), self._tensor(tensor.as_subclass(Tensor), name), vars(tensor))
        keys, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        parts = [(key, self._tensor(getattr(tensor, key), f"{name}.{key}")) for key in keys]
        return ("wrapper", class_name(tensor), parts, context, (tensor.shape, tensor.stride()))

    def _dtensor(self, tensor: Tensor, name: str) -> tuple[Any, ...] | None:
        """Reference to a DTensor's local shard; None for another tensor."""
        if "torch.distributed.tensor" not in sys.modules:
            return None  # a script that did not import it has no DTensors; the import would take 0.4 s
        from torch.distributed.tensor import DTensor

        if not isinstance(tensor, DTensor):
            return None
        from everstep.training.state.dtensors import describe

        description = describe(tensor)
        number = self._tensor(tensor._local_tensor.detach(), name)
        if isinstance(number, int):
            self._state.dtensors[number] = tensor, description
        return ("dtensor", number, description)

    def _array(self, array: numpy.ndarray[Any, Any]) -> tuple[Any, ...]:
        """Reference to a numpy array."""
        name = self._paths.get(id(array), "array")
        if type(array) is not numpy.ndarray or array.dtype.hasobject:
            raise CheckpointError(
                f"a state dict has a {type(array).__name__} of {array.dtype} ({name}), which cannot be saved: use a "
                "plain array of numbers or texts"
            )
        order = "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"
        rows = numpy.array(array.T if order == "F" else array, order="C")
        try:
            return ("array", self._add(torch.from_numpy(rows), name), None, (), order)
        except (TypeError, ValueError):  # torch does not have this type of numbers, or this order of their bytes
            raw = torch.from_numpy(rows.reshape(-1).view(numpy.uint8))
            descr = numpy.lib.format.dtype_to_descr(array.dtype)
            return ("array", self._add(raw, name), descr, rows.shape, order)

    def _add(self, tensor: Tensor, name: str) -> int:
        if tensor.is_conj() or tensor.is_neg():  # a lazily conjugated tensor's memory is not its value
            tensor = tensor.resolve_conj().resolve_neg()
        tensors = self._state.tensors
        tensors.append(tensor)
        self._state.names.append(name)
        return self._state.first + len(tensors) - 1


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
