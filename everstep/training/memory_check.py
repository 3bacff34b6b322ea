"""Checks before the first step that this machine has enough memory for the checkpoints of its ranks."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from everstep.errors import CheckpointError
from everstep.slots.file import SlotFile
from everstep.slots.footprint import SAFE_SLOTS, footprint, refusal
from everstep.slots.format import BACKUP, OWN, aligned
from everstep.system.memory import free, memory_available
from everstep.training.state.subclasses import parts_of

MOMENTS = {
    **dict.fromkeys(("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "SparseAdam", "Adadelta", "Rprop"), 2),
    **dict.fromkeys(("Muon", "ASGD"), 1),
}
"""Optimizer → number of tensors of a parameter's size that it keeps for each parameter; options may add more."""


def check_room(things: Iterable[Any], file: SlotFile, *, ranks: int, backup_slots: int, where: str) -> None:
    """Check that the slots of all ranks of this machine will fit; a new file gets fewer slots if not all of them do.

    Args:
        things: The objects of ``Run.checkpoint``.
        file: This rank's slots.
        ranks: Number of ranks on this machine; each is assumed to need as much as this one.
        backup_slots: Number of slots of each backup; 0: there are no backups.
        where: Name of the machine.

    Raises:
        CheckpointError: there is not enough memory for three slots; the message has all numbers and what to do.
    """
    size = estimated_bytes(things)
    used = sum(_allocated(path) for path in file.path.parent.glob("*") if path.name.startswith((OWN, BACKUP)))
    rooms = free(file.path.parent) + used, memory_available() + used

    def lack(slots: int) -> str:
        return refusal(footprint(size, ranks, slots, backup_slots), *rooms, where)

    wanted, least = file.slots, file.slots if file.is_mapped else min(file.slots, SAFE_SLOTS)
    slots = next((slots for slots in range(wanted, least - 1, -1) if not lack(slots)), 0)
    if not slots:
        raise CheckpointError(f"{lack(least)}. (The size of the state is estimated from models and optimizers.)")
    if slots < wanted:
        file.slots = slots
        warnings.warn(
            f"everstep: there is room for {slots} slots instead of {wanted}: {lack(slots + 1)}. Steps are saved as "
            "before, but the loss of a machine may cost more steps",
            RuntimeWarning,
            stacklevel=3,
        )


def estimated_bytes(things: Iterable[Any]) -> int:
    """Size of a rank's state, bytes, from parameters, buffers, and the current or expected state of optimizers.

    Other objects than modules and optimizers of torch are left out: a call of ``state_dict`` may have effects, e.g. a
    data loader may begin to load.
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
    """Number of tensors of a parameter's size that an optimizer will keep for it; 0: the optimizer is not known."""
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
    """Bytes of a tensor in a slot; for a DTensor, the bytes of its local shard."""
    return sum(aligned(part.numel() * part.element_size()) for part in parts_of(tensor))


def _allocated(path: Path) -> int:
    try:
        return path.stat().st_blocks * 512
    except FileNotFoundError:
        return 0
