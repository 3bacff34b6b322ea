"""The plan of a job: memory, saves, traffic and restarts, computed from sizes and rates."""

from __future__ import annotations

from dataclasses import dataclass

from everstep.decisions.sizing.load import Load
from everstep.decisions.sizing.restart import RestartPart, plan_replacement, plan_restart
from everstep.decisions.sizing.saves import SavePlan, plan_saves
from everstep.decisions.sizing.traffic import BackupPlan, FilePlan, plan_backups, plan_disk, plan_remote
from everstep.slots.footprint import Footprint, footprint, refusal

MOST_SLOTS = range(2, 9)
"""The numbers of slots that a job may have (``checkpoint_policy.py``)."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a job's checkpoints need on each machine, and how long they take."""

    memory: Footprint
    refusal: str
    """Why the slots do not fit into the machine, and what helps; empty: they fit."""
    most_slots: tuple[int, int] | None
    """The most slots of a rank and of a backup that fit into the memory, if /dev/shm may use all of it; None: not even
    two slots without backups fit."""
    saves: SavePlan
    backups: BackupPlan | None
    """None: there are no backups."""
    disk: FilePlan | None
    remote: FilePlan | None
    restart: list[RestartPart]
    """After a rank died."""
    replacement: list[RestartPart]
    """After a machine was lost; empty: the job has one machine."""


def plan_job(load: Load) -> Plan:
    """Compute the plan of a job."""
    saves = plan_saves(load)
    backups = plan_backups(load, saves.step_s, saves.every_steps)
    memory = _memory(load, load.policy.slots, load.backup_slots)
    return Plan(
        memory=memory,
        refusal=refusal(memory, load.hardware.shm_bytes, load.hardware.memory_bytes, "each machine"),
        most_slots=_most_slots(load),
        saves=saves,
        backups=backups,
        disk=plan_disk(load, saves.step_s),
        remote=plan_remote(load, saves.step_s),
        restart=plan_restart(load),
        replacement=plan_replacement(load, backups) if load.machines > 1 else [],
    )


def _memory(load: Load, slots: int, backup_slots: int) -> Footprint:
    return footprint(load.state_bytes, load.ranks, slots, backup_slots)


def _most_slots(load: Load) -> tuple[int, int] | None:
    """The most slots that fit, with backups if possible."""
    backups = [load.backup_slots, MOST_SLOTS.start, 0] if load.backup_slots else [0]
    choices = [(slots, count) for count in backups for slots in reversed(MOST_SLOTS)]
    fit = (one for one in choices if _memory(load, *one).total <= load.hardware.memory_bytes)
    return next(fit, None)
