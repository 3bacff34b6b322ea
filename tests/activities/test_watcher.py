"""A watcher between real workflows and agents that say what a test wants."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
import pytest
from temporalio.client import Client, WorkflowHandle
from temporalio.worker import Worker

from activities.ledger.records import NumbersUsed
from activities.watcher import Watcher
from agent.client import AgentPool
from agent.v1 import agent_pb2 as pb
from agent.v1 import agent_pb2_grpc
from everstep.job import JobSpec
from everstep.job_state import JobState, job_workflow_id
from everstep.machine import Machine
from tests.workflows.conftest import ScriptedCluster
from workflows.job import JobWorkflow
from workflows.messages import JobResult
from workflows.registry import WORKFLOWS, sandbox


class SpokenAgent(agent_pb2_grpc.AgentServicer):
    """Streams the observations that a test puts into it, as an agent's log does."""

    def __init__(self, machine: str) -> None:
        self.machine = machine
        self.said: list[pb.Observation] = []
        self.acknowledged = 0
        self.listeners = 0

    def exited(self, job: str, generation: int, rank: int, end: pb.Exit, *, finished: bool) -> None:
        number = len(self.said) + 1
        ended = pb.RankExited(rank=rank, exit=end, attached=True, finished=finished)
        self.said.append(
            pb.Observation(
                sequence=number,
                id=f"{self.machine}-{number}",
                machine=self.machine,
                job=job,
                generation=generation,
                rank_exited=ended,
            )
        )

    async def Observe(self, request: pb.ObserveRequest, context: Any) -> AsyncIterator[pb.Observation]:  # noqa: N802
        after, self.listeners = request.after_sequence, self.listeners + 1
        try:
            while True:
                for one in self.said[after:]:
                    after = one.sequence
                    if one.job == request.job and one.sequence > self.acknowledged:
                        yield one
                await asyncio.sleep(0.02)
        finally:
            self.listeners -= 1

    async def Acknowledge(self, request: pb.AcknowledgeRequest, context: Any) -> pb.AcknowledgeReply:  # noqa: N802
        self.acknowledged = max(self.acknowledged, request.up_to_sequence)
        return pb.AcknowledgeReply()


@dataclass
class Place:
    """Two spoken agents, a scripted cluster and a watcher."""

    client: Client
    queue: str
    machines: list[Machine]
    agents: list[SpokenAgent]
    cluster: ScriptedCluster = field(default_factory=ScriptedCluster)

    async def start(self, name: str, machines: int) -> WorkflowHandle[JobWorkflow, JobResult]:
        """Start a job of one rank on each machine."""
        spec = JobSpec(name=name, script="/job.py", machines=machines)
        return await self.client.start_workflow(
            JobWorkflow.run,
            JobState(spec=spec, machines=self.machines[:machines]),
            id=job_workflow_id(name),
            task_queue=self.queue,
        )

    async def until_watched(self, listeners: int) -> None:
        """As many agents are listened to as are said."""
        while sum(agent.listeners for agent in self.agents) != listeners:  # noqa: ASYNC110 - nobody tells us
            await asyncio.sleep(0.05)


@pytest.fixture
async def place(temporal: Client) -> AsyncIterator[Place]:
    servers, machines, agents = [], [], []
    for number in range(2):
        server, agent = grpc.aio.server(), SpokenAgent(f"m{number}")  # type: ignore[abstract]
        agent_pb2_grpc.add_AgentServicer_to_server(agent, server)
        port = server.add_insecure_port("127.0.0.31:0")
        await server.start()
        servers.append(server)
        agents.append(agent)
        machines.append(Machine(name=agent.machine, address=f"127.0.0.31:{port}"))
    found = Place(temporal, f"q-{uuid.uuid4().hex[:8]}", machines, agents)
    cluster, pool = found.cluster, AgentPool()
    async with Worker(
        temporal,
        task_queue=found.queue,
        workflows=list(WORKFLOWS),
        activities=cluster.activities,
        workflow_runner=sandbox(),
    ):
        watching = asyncio.create_task(Watcher(temporal, pool).run())
        yield found
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
    await pool.close()
    for server in servers:
        await server.stop(None)


DONE = pb.Exit(kind=pb.Exit.CODE, value=0, time_ns=1)
KILLED = pb.Exit(kind=pb.Exit.SIGNAL, value=9, time_ns=2)


async def test_a_name_used_again_is_watched_as_what_it_is_now(place: Place) -> None:
    first = await place.start("again", 1)
    await place.until_watched(1)
    await first.signal(JobWorkflow.stop, {"operator": "test"})
    assert (await first.result()).outcome == "stopped"
    await place.until_watched(0)  # what is over is not watched

    place.cluster.used = NumbersUsed(generations=1, incidents=0)
    second = await place.start("again", 2)
    await place.until_watched(2)
    place.agents[0].exited("again", 2, 0, DONE, finished=True)
    await asyncio.sleep(0.5)
    assert (await second.query(JobWorkflow.current_state)).outcome == "", "one rank of two has ended"
    place.agents[1].exited("again", 2, 1, KILLED, finished=False)
    while not (await second.query(JobWorkflow.current_state)).incidents:  # noqa: ASYNC110 - nobody tells us
        await asyncio.sleep(0.05)
    await second.signal(JobWorkflow.stop, {"operator": "test"})
    await second.result()
