"""Refuses, at the first save, objects whose state would not come back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from everstep.errors import CheckpointError
from everstep.training.state.layout import overlaps_itself
from everstep.training.state.subclasses import parts_of

_CALLS = {
    "DistributedOptimizer": "get_parameter_state_dp_reshardable() beside state_dict()",
    "ChainedOptimizer": "get_parameter_state_dp_reshardable() of each of its optimizers beside state_dict()",
}
"""Class of an optimizer of Megatron-LM → the calls that give the state of this rank."""


def refuse_what_cannot_return(name: str, thing: Any, state: Any) -> None:
    """Check that an object's ``state_dict`` has its state, and that its ``load_state_dict`` can load it.

    Args:
        name: The object's name in ``Run.checkpoint``.
        thing: The object.
        state: Its state dict.

    Raises:
        CheckpointError: most of the optimizer state within the object is not in its state dict, or a module has an
            expanded tensor, into which torch copies nothing.
    """
    if hasattr(thing, "param_groups"):  # not a scheduler, which keeps its optimizer in an attribute
        _refuse_incomplete(name, thing, state)
    if isinstance(thing, torch.nn.Module):
        for key, tensor in (*thing.named_parameters(), *thing.named_buffers()):
            if any(part.numel() and overlaps_itself(part) for part in parts_of(tensor) if not part.is_sparse):
                raise CheckpointError(
                    f"{name}.{key} is an expanded tensor: torch's load_state_dict() cannot copy into it. Register "
                    "a clone() of it"
                )


def _refuse_incomplete(name: str, thing: Any, state: Any) -> None:
    held = sum(_bytes(optimizer.state.values()) for optimizer in _optimizers(thing))
    saved = _bytes([state])
    if held > 2 * saved:
        kind = type(thing).__name__
        call = _CALLS.get(kind, "the call of its library for the complete state of this rank")
        raise CheckpointError(
            f"{name!r} is a {kind} with {held} bytes of optimizer state, but its state_dict() has only {saved}. A "
            f"restart would begin with empty moments. Pass an object whose state_dict() returns what {call} gives, and "
            "whose load_state_dict() loads it"
        )


def _optimizers(thing: Any, depth: int = 2) -> Iterator[Optimizer]:
    """The optimizers of torch that an object is, or keeps in its attributes."""
    if isinstance(thing, Optimizer):
        yield thing
    if isinstance(thing, torch.nn.Module) or not depth:
        return
    for value in vars(thing).values() if hasattr(thing, "__dict__") else ():
        inner = value if type(value) in {list, tuple} else [value]
        for one in inner:
            if isinstance(one, Optimizer) or hasattr(one, "param_groups"):
                yield from _optimizers(one, depth - 1)


def _bytes(values: Iterable[Any]) -> int:
    """Bytes of the tensors within some values."""
    total, to_do = 0, list(values)
    while to_do:
        value = to_do.pop()
        if isinstance(value, Tensor):
            total += sum(part.numel() * part.element_size() for part in parts_of(value))
        elif isinstance(value, Mapping):
            to_do += value.values()
        elif isinstance(value, list | tuple):
            to_do += value
    return total
