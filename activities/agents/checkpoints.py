"""Activities on copies of training state: what there is, whether there is room, and bringing it where it is needed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping

from temporalio import activity

from activities import messages
from activities.agents.call_all import on_all
from activities.agents.evidence import fitted, held_of, unlisted_of
from activities.agents.restore import CopyRestorer
from activities.heartbeat import heartbeating
from activities.messages import FindInput, FolderFound, FolderInput, RestoreInput, RoomInput
from agent.client import AgentClient, AgentClients
from agent.v1 import agent_pb2 as pb
from everstep.base.text import listed
from everstep.decisions.keep.capacity import Room, lack_of_room
from everstep.decisions.keep.starts import folder_of, judge_folder
from everstep.model.evidence import Evidence
from everstep.model.machine import Machine
from everstep.model.state_copy import Restored

LISTING_S = 60.0
"""A listing of disks and remote storage may take this long, seconds."""
MARGIN_S = 15.0
"""An agent answers so long after the storage that it asks, or does not; seconds."""


class CheckpointActivities:
    """The activities that ask the agents for copies of training state. All of them may run twice."""

    def __init__(self, agents: AgentClients) -> None:
        self._agents = agents

    @activity.defn(name=messages.FIND)
    async def find(self, search: FindInput) -> Evidence:
        """What copies the machines hold, on disks and remote storage too."""
        policy, answer_s = search.spec.checkpoint, search.spec.policy.storage.answer_s
        request = pb.CheckpointsRequest(
            job=search.spec.name, disk_path=policy.disk_path, remote_url=policy.remote_url, patience_s=answer_s
        )

        async def list_copies(machine: Machine, client: AgentClient) -> pb.CheckpointsReply:
            return await client.checkpoints(request, timeout_s=answer_s + MARGIN_S)

        async with heartbeating() as say:
            done, silent = await on_all(
                self._agents, search.machines, list_copies, say=say, patience_s=search.patience_s
            )
            return await asyncio.to_thread(_evidence_of, search, done, silent)

    @activity.defn(name=messages.FOLDER)
    async def folder(self, look: FolderInput) -> FolderFound:
        """Whether a job can start from the folder of one checkpoint, and at which step."""
        parts = folder_of(look.path)
        if parts is None:
            example = "/disk/job/step-000000120"
            return FolderFound(problem=f"{look.path} is no checkpoint: give an absolute path such as {example}")
        request = pb.CheckpointsRequest(job=parts.job, disk_path=parts.root)

        saved_by: dict[int, tuple[str, str]] = {}

        async def list_ranks(machine: Machine, client: AgentClient) -> dict[int, str]:
            reply = await client.checkpoints(request, timeout_s=LISTING_S)
            in_folder = [
                copy
                for copy in reply.checkpoints
                if copy.tier == pb.HeldCheckpoint.DISK
                and copy.completed_steps == parts.step
                and copy.place.startswith(f"{parts.root}/")
            ]
            saved_by.update((copy.rank, (copy.run, copy.topology)) for copy in in_folder if copy.valid)
            return {copy.rank: "" if copy.valid else copy.reason for copy in in_folder}

        async with heartbeating() as say:
            seen, silent = await on_all(self._agents, look.machines, list_ranks, say=say, patience_s=look.patience_s)
        if silent:
            return FolderFound(problem=f"{listed(silent)} does not answer: bring its agent back")
        ranks = len({rank for ranks_seen in seen.values() for rank in ranks_seen})
        return FolderFound(problem=judge_folder(look.path, seen, saved_by), step=parts.step, ranks=ranks)

    @activity.defn(name=messages.ROOM)
    async def room(self, check: RoomInput) -> str:
        """Why the job's checkpoints do not fit, with numbers; empty when they do."""

        async def describe(machine: Machine, client: AgentClient) -> pb.DescribeReply:
            return await client.describe()

        async with heartbeating() as say:
            done, _ = await on_all(self._agents, check.machines, describe, say=say, patience_s=check.patience_s)
        rooms = {
            machine: Room(shm_free=reply.room.shm_free, memory_available=reply.room.memory_available)
            for machine, reply in done.items()
            if reply.HasField("room")
        }
        return lack_of_room(check.spec, check.machines, rooms)

    @activity.defn(name=messages.RESTORE)
    async def restore(self, restore: RestoreInput) -> Restored:
        """Bring copies into the own slots of the machines whose ranks need them."""
        async with heartbeating() as say:
            return await CopyRestorer(self._agents, restore, say).run()


def _evidence_of(search: FindInput, done: Mapping[str, pb.CheckpointsReply], silent: Iterable[str]) -> Evidence:
    checkpoints = {machine: reply.checkpoints for machine, reply in done.items()}
    held, shared = held_of(checkpoints, search.spec.assignment([machine.name for machine in search.machines]).homes())
    found = Evidence(
        generation=0,
        held=held,
        unreachable=sorted(silent),
        disk_shared=shared,
        unlisted=unlisted_of(checkpoints, silent, remote_asked=bool(search.spec.checkpoint.remote_url)),
    )
    return fitted(found, at=search.at)
