"""Checks, before a job starts, that its machines have room for its checkpoints."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from everstep.base.addresses import is_loopback
from everstep.base.text import listed
from everstep.model.job import JobSpec
from everstep.model.machine import Machine
from everstep.slots.footprint import SAFE_SLOTS, footprint, refusal

SHOWN = 3
"""The number of machines whose lack of room is described in full."""


@dataclass(frozen=True, slots=True)
class Room:
    """The free memory of a machine, bytes."""

    shm_free: int
    memory_available: int


def lack_of_room(spec: JobSpec, machines: Sequence[Machine], rooms: Mapping[str, Room]) -> str:
    """Return why the job cannot start, with sizes; empty: it can start, or the size of its state is not set.

    Args:
        spec: The job; ``checkpoint.state_mb_per_rank`` is the size of a rank's state.
        machines: The job's machines. Machines on loopback addresses share this host's memory.
        rooms: The free memory of each machine; a machine without an entry is not checked.
    """
    policy = spec.checkpoint
    if not policy.state_mb_per_rank:
        return ""
    by_host: dict[str, list[str]] = defaultdict(list)
    for machine in machines:
        if machine.name in rooms:
            by_host["this host" if is_loopback(machine.host) else f"machine {machine.name}"].append(machine.name)
    backup_slots = policy.backup_slots if policy.backup and spec.machines > 1 else 0
    refusals = []
    for host, names in by_host.items():
        ranks = spec.ranks_per_machine * len(names)
        need = footprint(round(policy.state_mb_per_rank * 1e6), ranks, min(policy.slots, SAFE_SLOTS), backup_slots)
        shm_free = min(rooms[name].shm_free for name in names)
        memory = min(rooms[name].memory_available for name in names)
        shown = host if len(names) == 1 else f"{host}, on which {len(names)} machines of the job are"
        if text := refusal(need, shm_free, memory, shown):
            refusals.append(text)
    return listed(refusals, SHOWN, noun="machines", separator="; ")
