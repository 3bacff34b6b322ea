"""Check room: ask the machines of a new job whether the job's checkpoints fit."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from activities.activity import Activity, Bounds, twice
from activities.heartbeat import Say
from everstep.decisions.keep.capacity import Room, lack_of_room
from everstep.model.job import PlacedJob
from everstep.model.machine import Machine

if TYPE_CHECKING:
    from activities.tools import Tools
    from agent.client import AgentClient
    from agent.v1 import agent_pb2 as pb


class CheckRoom(Activity[str]):
    """Ask all machines whether the job's checkpoints fit. The result is the reason why they do not fit, with numbers;
    empty: they fit."""

    name = "Check room"

    job: PlacedJob
    patience_s: float = 10.0

    def line(self) -> str:
        return f"for {self.job.spec.checkpoint.state_mb_per_rank:g} MB of state in each rank"

    def bounds(self) -> Bounds:
        return twice(timedelta(minutes=1))

    async def perform(self, tools: Tools, say: Say) -> str:
        from activities.agents.call_all import on_all

        async def describe(_machine: Machine, client: AgentClient) -> pb.DescribeReply:
            return await client.describe()

        done, _ = await on_all(tools.agents, self.job.machines, describe, say=say, patience_s=self.patience_s)
        rooms = {
            machine: Room(shm_free=reply.room.shm_free, memory_available=reply.room.memory_available)
            for machine, reply in done.items()
            if reply.HasField("room")
        }
        return lack_of_room(self.job.spec, self.job.machines, rooms)
