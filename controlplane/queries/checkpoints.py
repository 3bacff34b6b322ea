"""Which checkpoints of a job exist, gathered from the agents of its machines."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence

from pydantic import BaseModel

from activities.agents.evidence import held_of
from agent.checkpoints.tiers.listing import UNFINISHED
from agent.client import AgentClients
from agent.v1 import agent_pb2 as pb
from everstep.decisions.keep.choose_restore import MEMORY, nearest
from everstep.decisions.keep.lineage import UNKNOWN, Lineage, Runs, usable
from everstep.decisions.keep.placement import Placement, place_backups
from everstep.errors import AgentUnreachable
from everstep.model.job import JobSpec
from everstep.model.machine import Assignment, Machine
from everstep.model.state_copy import StateCopy, Tier
from everstep.model.topology import Topology
from everstep.slots.format import CUT_SHORT, NEVER_USED

LISTING_S = 60.0
"""A listing of disks and remote storage may take this long, seconds."""
VERIFYING_S = 600.0
"""And this long when every byte is read."""


class StepCopies(BaseModel):
    """One step of which copies exist."""

    step: int
    saved_ns: int
    """When its newest copy was saved; 0: not known."""
    missing: list[int]
    """Ranks that no valid copy exists of; a restore needs none to be missing."""
    ranks: dict[Tier, int]
    """Of how many ranks there are valid copies in each tier."""
    state_bytes: int
    """Of the state, once for each rank that has it."""
    copies_bytes: int
    """Of all valid copies."""

    @property
    def restorable(self) -> bool:
        """Whether every rank can restore it."""
        return not self.missing


class CheckpointsReport(BaseModel):
    """The checkpoints of a job; the JSON of ``everstep checkpoints``."""

    job: str
    world_size: int
    steps: list[StepCopies]
    """The newest first."""
    restorable: list[int]
    """Steps that every rank can restore, the newest first."""
    damaged: list[StateCopy]
    unfinished: int
    """Files on remote storage without a manifest: on their way, or cut short when the job ended; never used."""
    unlisted: list[StateCopy]
    """Folders and storage that could not be listed, with reasons: what lies there is not known."""
    disowned: int
    """Copies of steps that the job has since gone back from; it never restores them."""
    silent: list[str]
    """Machines whose agent does not answer: what they hold is missing here."""
    backup_machines: dict[str, str]
    """Machine → the one that holds its backups; empty: there are none."""
    backups: str
    """What may be lost with the owners of the backups."""


async def ask_for_copies(
    agents: AgentClients, spec: JobSpec, machines: Sequence[Machine], *, verify: bool = False
) -> tuple[list[StateCopy], list[str]]:
    """What the machines hold of a job in all tiers, and the machines that do not answer.

    Args:
        agents: Clients.
        spec: The job; it says where disk and remote checkpoints are.
        machines: Whom to ask.
        verify: Let them read every byte and compare checksums.

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
    held, _ = held_of(listings, spec.assignment([machine.name for machine in machines]).homes())
    return held, [name for name, reply in replies.items() if reply is None]


def report_of(
    spec: JobSpec,
    machines: Sequence[Machine],
    held: Sequence[StateCopy],
    silent: Sequence[str],
    *,
    lineage: Lineage = (),
    runs: Runs = UNKNOWN,
    stepping: bool = False,
) -> CheckpointsReport:
    """The copies by step.

    Args:
        spec: The job.
        machines: Its machines.
        held: What they hold.
        silent: Those that did not answer.
        lineage: The line of a job that goes on; of one that has ended every step may be started from.
        runs: Which run of its name it is, of a job that goes on.
        stepping: Its ranks save at this moment, so that a slot which is being saved into is no damage.
    """
    assignment = spec.assignment([machine.name for machine in machines])
    topology = assignment.topology
    ours = usable(held, lineage, runs=runs)
    used = nearest(ours, assignment)
    copies: dict[int, list[StateCopy]] = defaultdict(list)
    for copy in ours:
        if copy.valid and copy.completed_steps in used and copy.rank < topology.world_size:
            copies[copy.completed_steps].append(copy)
    steps = [_step(step, copies[step], used[step], topology) for step in sorted(used, reverse=True)]
    placement = place_backups(topology, [machine.domain for machine in machines])
    backup = spec.checkpoint.backup
    return CheckpointsReport(
        job=spec.name,
        world_size=topology.world_size,
        steps=steps,
        restorable=[step.step for step in steps if step.restorable],
        damaged=[copy for copy in ours if _is_damage(copy, stepping)],
        unfinished=sum(copy.reason == UNFINISHED for copy in ours),
        unlisted=[copy for copy in ours if copy.unlisted],
        disowned=len(held) - len(ours),
        silent=list(silent),
        backup_machines=_backup_machines(assignment, placement) if backup else {},
        backups=placement.reason if backup else "there are none: backup is false in [checkpoint]",
    )


def _is_damage(copy: StateCopy, stepping: bool) -> bool:
    being_saved = stepping and copy.tier in MEMORY and copy.reason == CUT_SHORT
    return not (copy.valid or copy.unlisted or being_saved or copy.reason in {NEVER_USED, UNFINISHED})


def _step(step: int, copies: Sequence[StateCopy], used: Mapping[int, StateCopy], topology: Topology) -> StepCopies:
    return StepCopies(
        step=step,
        saved_ns=max(copy.saved_ns for copy in copies),
        missing=sorted(set(range(topology.world_size)) - used.keys()),
        ranks={tier: len({copy.rank for copy in copies if copy.tier == tier}) for tier in Tier},
        state_bytes=sum(copy.bytes for copy in used.values()),
        copies_bytes=sum(copy.bytes for copy in copies),
    )


def _backup_machines(assignment: Assignment[str], placement: Placement) -> dict[str, str]:
    peers = {machine: placement.peers[ranks[0]] for machine, ranks in assignment.each()}
    return {machine: assignment.home(peer) for machine, peer in peers.items() if peer is not None}
