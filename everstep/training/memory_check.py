"""The check before the first step that this machine has room for the checkpoints of its ranks."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from everstep.errors import CheckpointError
from everstep.slots.file import SlotFile
from everstep.slots.footprint import footprint, refusal
from everstep.slots.format import BACKUP, OWN, aligned
from everstep.system.memory import free, memory_available

MOMENTS = {
    **dict.fromkeys(("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "SparseAdam", "Adadelta", "Rprop"), 2),
    **dict.fromkeys(("Muon", "ASGD"), 1),
}
"""Tensors of a parameter's size that torch's optimizers keep for each, beside what their options add."""


def check_room(things: Iterable[Any], file: SlotFile, *, ranks: int, backup_slots: int, where: str) -> None:
    """Refuse to begin when the slots of all ranks of this machine will not fit.

    Args:
        things: The objects given to ``Run.checkpoint``.
        file: This rank's slots.
        ranks: Ranks on this machine; each is assumed to need as much as this one.
        backup_slots: Slots of each backup of another machine's rank; 0: there are no backups.
        where: Name of the machine.

    Raises:
        CheckpointError: there is not enough room; with all numbers and what to do.
    """
    need = footprint(estimated_bytes(things), ranks, file.slots, backup_slots)
    held = sum(_allocated(path) for path in file.path.parent.glob("*") if _is_ours(path))
    if reason := refusal(need, free(file.path.parent) + held, memory_available() + held, where):
        raise CheckpointError(f"{reason}. (The size of the state is estimated from models and optimizers.)")


def estimated_bytes(things: Iterable[Any]) -> int:
    """Size of a rank's state, from parameters, buffers, and the optimizers' state as it is or as it will be.

    Things that are neither modules nor optimizers of torch are not asked: data loaders begin to load when they are.
    """
    total = 0
    for thing in things:
        if isinstance(thing, torch.nn.Module):
            total += sum(_size(tensor) for tensor in (*thing.parameters(), *thing.buffers()))
        elif isinstance(thing, torch.optim.Optimizer):
            total += sum(
                _state(thing, group, parameter) for group in thing.param_groups for parameter in group["params"]
            )
    return total


def _state(optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: Tensor) -> int:
    if state := optimizer.state.get(parameter):
        return sum(_size(value) for value in state.values() if isinstance(value, Tensor))
    return _moments(optimizer, group) * _size(parameter) if parameter.requires_grad else 0


def _moments(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> int:
    """Tensors of a parameter's size that an optimizer will keep for it; 0: the optimizer is not known."""
    for kind in type(optimizer).__mro__:
        momentum = bool(group.get("momentum"))
        if kind.__name__ == "SGD":
            return int(momentum)
        if kind.__name__ == "RMSprop":
            return 1 + momentum + bool(group.get("centered"))
        if kind.__name__ in MOMENTS:
            return MOMENTS[kind.__name__] + bool(group.get("amsgrad"))
    return 0


def _size(tensor: Tensor) -> int:
    """Bytes in a slot; of a DTensor its local shard."""
    local: Tensor = getattr(tensor, "_local_tensor", tensor)
    return aligned(local.numel() * local.element_size())


def _is_ours(path: Path) -> bool:
    """Whether a file of the job's folder has slots of ranks, or backups."""
    return path.name.startswith((OWN, BACKUP))


def _allocated(path: Path) -> int:
    try:
        return path.stat().st_blocks * 512
    except FileNotFoundError:
        return 0
