"""The checkpoints of a job, from the agents of its machines."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Sequence

from pydantic import BaseModel

from activities.agents.held_copies import held_of
from agent.checkpoints.tiers.listing import UNFINISHED
from agent.client import AgentClients
from agent.v1 import agent_pb2 as pb
from everstep.decisions.keep.choose_restore import MEMORY, ChosenCopies, all_ranks, copies_by_step, nearest, union
from everstep.decisions.keep.lineage import UNKNOWN, Lineage, Runs, usable
from everstep.decisions.keep.placement import Placement, place_backups
from everstep.errors import AgentUnreachable
from everstep.model.job import JobSpec
from everstep.model.machine import Assignment, Machine
from everstep.model.state_copy import StateCopies, Tier, count_of
from everstep.slots.format import CUT_SHORT, NEVER_USED

LISTING_S = 60.0
"""Time limit for a listing of disks and remote storage, seconds."""
VERIFYING_S = 600.0
"""Time limit for a listing that reads every byte, seconds."""


class StepCopies(BaseModel):
    """The copies of one step."""

    step: int
    saved_ns: int
    """Time of its newest save, nanoseconds; 0: not known."""
    missing: list[int]
    """Ranks without a valid copy; a restore needs copies of all ranks."""
    ranks: dict[Tier, int]
    """Tier → number of ranks with a valid copy there."""
    state_bytes: int
    """Bytes of the state, counted once for each rank that has a copy; copies of one save count as its largest copy."""
    copies_bytes: int
    """Bytes of all valid copies."""

    @property
    def restorable(self) -> bool:
        """Whether every rank can restore this step."""
        return not self.missing


class CheckpointsReport(BaseModel):
    """The checkpoints of a job; the JSON of ``everstep checkpoints``."""

    job: str
    world_size: int
    steps: list[StepCopies]
    """All steps, newest first."""
    restorable: list[int]
    """Steps that every rank can restore, the newest first."""
    damaged: list[StateCopies]
    unfinished: int
    """Number of files on remote storage without a manifest: they are being uploaded or were cut off, and are never
    used."""
    unlisted: list[StateCopies]
    """Folders and remote storage that could not be listed, with reasons; their contents are not known."""
    disowned: int
    """Number of copies of abandoned steps, which are never restored: the job restarted from an earlier step."""
    silent: list[str]
    """Machines whose agent does not answer; their copies are not in this report."""
    backup_machines: dict[str, str]
    """Machine → the machine that holds its backups; empty: there are no backups."""
    backups: str
    """Which machines may be lost without losing a step, as text."""


async def ask_for_copies(
    agents: AgentClients, spec: JobSpec, machines: Sequence[Machine], *, verify: bool = False
) -> tuple[list[StateCopies], list[str]]:
    """The copies of a job in all tiers, and the machines that do not answer.

    Args:
        agents: Clients of the agents.
        spec: The job, with the locations of its disk and remote checkpoints.
        machines: The machines to ask.
        verify: Whether the machines read every byte and compare checksums.

    Raises:
        AgentError: an agent refused.
    """
    policy = spec.checkpoint
    request = pb.CheckpointsRequest(
        job=spec.name, verify=verify, disk_path=policy.disk_path, remote_url=policy.remote_url
    )

    async def list_copies(machine: Machine) -> pb.CheckpointsReply | None:
        try:
            return await agents.get(machine.address).checkpoints(
                request, timeout_s=VERIFYING_S if verify else LISTING_S
            )
        except AgentUnreachable:
            return None

    replies = dict(zip([m.name for m in machines], await asyncio.gather(*map(list_copies, machines)), strict=True))
    listings = {name: reply.checkpoints for name, reply in replies.items() if reply is not None}
    held, _ = held_of(listings, spec.assignment([machine.name for machine in machines]))
    return held, [name for name, reply in replies.items() if reply is None]


def report_of(
    spec: JobSpec,
    machines: Sequence[Machine],
    held: Sequence[StateCopies],
    silent: Sequence[str],
    *,
    lineage: Lineage = (),
    runs: Runs = UNKNOWN,
    stepping: bool = False,
) -> CheckpointsReport:
    """Group the copies by step.

    Args:
        spec: The job.
        machines: Its machines.
        held: The copies on these machines.
        silent: The machines that did not answer.
        lineage: Lineage of a running job; empty for an ended job, which may start from any step.
        runs: The runs whose copies a running job may restore.
        stepping: Whether its ranks are saving. If so, a slot in the middle of a save does not count as damaged.
    """
    assignment = spec.assignment([machine.name for machine in machines])
    topology = assignment.topology
    ours = usable(held, lineage, runs=runs)
    used = {step: nearest(entries, assignment) for step, entries in copies_by_step(ours, assignment).items()}
    copies: dict[int, list[StateCopies]] = defaultdict(list)
    for entry in ours:
        if entry.valid and entry.completed_steps in used:
            copies[entry.completed_steps].append(entry.among(all_ranks(assignment)))
    steps = [_step(step, copies[step], used[step], assignment) for step in sorted(used, reverse=True)]
    placement = place_backups(topology, [machine.domain for machine in machines])
    backup = spec.checkpoint.backup
    return CheckpointsReport(
        job=spec.name,
        world_size=topology.world_size,
        steps=steps,
        restorable=[step.step for step in steps if step.restorable],
        damaged=[copy for copy in ours if _is_damage(copy, stepping)],
        unfinished=count_of(copy for copy in ours if copy.reason == UNFINISHED),
        unlisted=[copy for copy in ours if copy.unlisted],
        disowned=count_of(held) - count_of(ours),
        silent=list(silent),
        backup_machines=_backup_machines(assignment, placement) if backup else {},
        backups=placement.reason if backup else "there are none: backup is false in [checkpoint]",
    )


def _is_damage(copy: StateCopies, stepping: bool) -> bool:
    being_saved = stepping and copy.tier in MEMORY and copy.reason == CUT_SHORT
    return not (copy.valid or copy.unlisted or being_saved or copy.reason in {NEVER_USED, UNFINISHED})


def _step(step: int, copies: Sequence[StateCopies], used: ChosenCopies, assignment: Assignment[str]) -> StepCopies:
    return StepCopies(
        step=step,
        saved_ns=max(entry.last_ns for entry in copies),
        missing=[*(all_ranks(assignment) - union(used.all))],
        ranks={tier: len(union(entry for entry in copies if entry.tier == tier)) for tier in Tier},
        state_bytes=_bytes_of(used.all),
        copies_bytes=_bytes_of(copies),
    )


def _bytes_of(copies: Iterable[StateCopies]) -> int:
    return sum(entry.bytes * count_of([entry]) for entry in copies)


def _backup_machines(assignment: Assignment[str], placement: Placement) -> dict[str, str]:
    peers = {machine: placement.peers[ranks[0]] for machine, ranks in assignment.each()}
    return {machine: assignment.home(peer) for machine, peer in peers.items() if peer is not None}
