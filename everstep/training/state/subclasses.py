"""Takes tensors apart that are made of other tensors, and finds their classes again.

A class of tensors with ``__tensor_flatten__``, e.g. DTensor and the low-bit tensors of torchao, keeps its data in other
tensors. Those are saved. A class is found by its name, and only among the modules that the script has imported, so that
a checkpoint file imports nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import reduce

from torch import Tensor

from everstep.errors import CheckpointError


def is_wrapper(tensor: Tensor) -> bool:
    """Whether a tensor keeps its data in other tensors."""
    return hasattr(type(tensor), "__tensor_flatten__")


def parts_of(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors that have a tensor's data: for a DTensor its local shard, for a plain tensor the tensor itself."""
    if type(tensor) is Tensor or not is_wrapper(tensor):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    for part in (getattr(tensor, name) for name in names):
        if isinstance(part, Tensor):  # a DTensor names its mesh too
            yield from parts_of(part)


def class_name(tensor: Tensor) -> tuple[str, str]:
    """Module and name of a tensor's class.

    Raises:
        CheckpointError: the class cannot be found by its name, e.g. since it was made in a function.
    """
    kind = type(tensor)
    name = kind.__module__, kind.__qualname__
    if _find(*name) is not kind:
        raise CheckpointError(
            f"a state dict has a tensor of the class {'.'.join(name)}, which a later process cannot find: define the "
            "class at the top level of its module"
        )
    return name


def class_of(module: str, name: str) -> type[Tensor]:
    """The class of tensors with a name.

    Raises:
        CheckpointError: the script has not imported it.
    """
    kind = _find(module, name)
    if kind is None:
        raise CheckpointError(
            f"the checkpoint has a tensor of the class {module}.{name}, which the script has not imported: import it "
            "before run.steps()"
        )
    return kind


def _find(module: str, name: str) -> type[Tensor] | None:
    found = reduce(lambda at, key: getattr(at, key, None), name.split("."), sys.modules.get(module))
    return found if isinstance(found, type) and issubclass(found, Tensor) else None
