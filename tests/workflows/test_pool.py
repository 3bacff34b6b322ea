"""The machine pool on a real server, with requests of jobs, incidents and operators, and fake agents over gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from temporalio.api.sdk.v1 import WorkflowMetadata
from temporalio.client import Client, WorkflowExecutionStatus, WorkflowHandle, WorkflowUpdateFailedError
from temporalio.service import RPCError
from temporalio.worker import Worker

from activities.clusters.cluster import ListedCluster, Listing
from activities.pool.look_at_machines import LookAtMachines
from activities.pool.provision_machines import ProvisionMachines
from activities.pool.ready_standbys import ReadyStandbys
from activities.pool.requests import (
    AwaitStandbys,
    GiveMachinesBack,
    LeaseMachines,
    ReplaceMachines,
    keep_pool,
    update_pool,
)
from activities.registry import function
from agent.client import AgentClients
from agent.fake import FakeAgent
from agent.v1 import agent_pb2 as pb
from everstep.errors import AgentError, AgentUnreachable, ClusterError
from everstep.model.eviction import Eviction
from everstep.model.job import JobSpec
from everstep.model.job_state import JobState, job_workflow_id
from everstep.model.machine import Machine
from everstep.model.pool import (
    Leased,
    LeaseRequest,
    OperatorMove,
    PoolMachine,
    PoolState,
    Replaced,
    ReplaceRequest,
    pool_workflow_id,
)
from everstep.model.recovery_policy import RecoveryPolicy
from tests.activities.performing import tools
from tests.activities.spoken import serving
from tests.workflows.asking import ASK_S, asked
from tests.workflows.conftest import ScriptedCluster, anomaly
from tests.workflows.test_evict import gone
from workflows.job import JobWorkflow
from workflows.registry import WORKFLOWS, sandbox

pytestmark = pytest.mark.timeout(180)
COUNT = 5


@dataclass
class Pooled:
    """A cluster of five machines, the last of which is a standby. It has a pool, and a worker that caches nothing."""

    client: Client
    queue: str
    machines: list[Machine]
    agents: list[FakeAgent]
    scripted: ScriptedCluster
    count: int = COUNT
    """The number of machines in the cluster's list."""
    at_most: int = 0
    grown: list[int] = field(default_factory=list)
    """The numbers of machines that the cluster was asked for."""
    refuses: str = ""
    """The reason with which the cluster refuses more machines; empty: it provides them."""

    def listing(self) -> Listing:
        return Listing(self.machines[: self.count], 1, self.at_most)

    async def grow(self, count: int) -> None:
        self.grown.append(count)
        if self.refuses:
            raise ClusterError(self.refuses)
        self.count = count

    @property
    def handle(self) -> WorkflowHandle[Any, Any]:
        return self.client.get_workflow_handle(pool_workflow_id(self.queue))

    async def start(
        self, name: str, *numbers: int, policy: RecoveryPolicy | None = None, code: str = ""
    ) -> WorkflowHandle[JobWorkflow, Any]:
        """Start a job on these machines. ``code`` is the digest of its snapshot."""
        name = f"{name}-{self.queue}"
        return await self.client.start_workflow(
            JobWorkflow.run,
            JobState(
                spec=JobSpec(
                    name=name,
                    script="job.py" if code else "/job.py",
                    code=code,
                    machines=len(numbers),
                    policy=policy or RecoveryPolicy(),
                ),
                machines=[self.machines[number] for number in numbers],
            ),
            id=job_workflow_id(name),
            task_queue=self.queue,
        )

    async def running(self, handle: WorkflowHandle[JobWorkflow, Any]) -> JobState:
        state: JobState = await self.until(handle, lambda state: state.status == "running")
        return state

    async def until(self, handle: WorkflowHandle[Any, Any], ok: Callable[[Any], bool]) -> Any:
        """Wait until the state of a job or of the pool is as wanted. Only the test's time-out limits the wait."""
        kind = PoolState if handle.id.startswith("pool/") else JobState
        return await asked(handle, "state", ok, kind)

    async def is_there(self) -> bool:
        """Return whether the pool's first poll is over."""
        try:
            state: PoolState = await self.handle.query("state", result_type=PoolState)
        except RPCError:
            return False
        return state.known

    async def places(self) -> dict[str, str]:
        """Return the place of each machine, for example ``m0`` → ``active gpt``."""
        state: PoolState = await self.handle.query("state", result_type=PoolState)
        return {name: self.place_of(one) for name, one in state.machines.items()}

    def place_of(self, one: PoolMachine) -> str:
        return f"{one.place} {one.job.removesuffix(f'-{self.queue}')}".strip()

    async def until_at(self, machine: str, place: str) -> PoolMachine:
        state = await self.until(
            self.handle, lambda state: machine in state.machines and self.place_of(state.machines[machine]) == place
        )
        return PoolMachine.model_validate(state.machines[machine])

    async def ask(self, name: str, request: Any, result: Any) -> Any:
        return await update_pool(self.client, self.queue, name, request, result)

    async def move(self, what: str, machine: str) -> str:
        move = OperatorMove(machine=machine, operator="me", reason="a loud fan")
        said: str = await self.handle.execute_update(what, move, result_type=str)
        return said


OF_THE_POOL = (
    *(LeaseMachines, ReplaceMachines, GiveMachinesBack, AwaitStandbys),
    *(LookAtMachines, ProvisionMachines, ReadyStandbys),
)


def ready_on(pool: PoolState) -> list[str]:
    return sorted(name for name, one in pool.machines.items() if one.ready)


def machine_agent(number: int) -> FakeAgent:
    return FakeAgent(
        describe=pb.DescribeReply(machine=f"m{number}"), inspect=pb.InspectReply(), release=pb.ReleaseReply()
    )


@pytest.fixture
async def pooled(temporal: Client) -> AsyncIterator[Pooled]:
    queue, scripted, clients = f"q-{uuid.uuid4().hex[:8]}", ScriptedCluster(), AgentClients()
    agents = [machine_agent(number) for number in range(COUNT + 2)]
    async with serving(agents) as machines:
        found = Pooled(temporal, queue, machines, agents, scripted)
        cluster = ListedCluster(found.listing, found.grow)
        given = tools(agents=clients, cluster=cluster)
        worker = Worker(
            temporal,
            task_queue=queue,
            workflows=list(WORKFLOWS),
            activities=[
                *scripted.of_ranks,
                *(function(kind, given) for kind in OF_THE_POOL),
            ],
            workflow_runner=sandbox(),
            max_cached_workflows=0,
        )
        async with worker:
            keeping = asyncio.create_task(keep_pool(temporal, queue))
            try:
                while not await found.is_there():  # noqa: ASYNC110 - there is no event
                    await asyncio.sleep(ASK_S)
                yield found
            finally:
                keeping.cancel()
                await asyncio.gather(keeping, return_exceptions=True)
                with contextlib.suppress(Exception):
                    await temporal.get_workflow_handle(pool_workflow_id(queue)).terminate("the test is over")
                await clients.close()


async def test_two_jobs_never_have_the_same_machine(pooled: Pooled) -> None:
    first = await pooled.start("gpt", 0, 1)
    await pooled.running(first)
    assert await pooled.places() == {
        "m0": "active gpt",
        "m1": "active gpt",
        "m2": "free",
        "m3": "free",
        "m4": "standby",
    }

    second = await (await pooled.start("bert", 1, 2)).result()
    assert second.outcome == "failed"
    assert f"m1: job gpt-{pooled.queue} has it" in second.headline
    assert (await pooled.places())["m2"] == "free"

    await first.signal("stop", {"operator": "me"})
    await first.result()
    third = await pooled.start("bert", 1, 2)
    await pooled.running(third)
    assert (await pooled.places())["m1"] == "active bert"


async def test_a_lease_ends_with_a_job_that_was_terminated_by_hand(pooled: Pooled) -> None:
    first = await pooled.start("gpt", 0, 1)
    await pooled.running(first)
    await first.terminate("by hand")

    await pooled.running(await pooled.start("bert", 0, 1))
    assert (await pooled.places())["m0"] == "active bert"


async def test_a_new_pool_finds_out_where_jobs_run(pooled: Pooled) -> None:
    """Temporal lists a running workflow only some time later. So the pool learns of the job from agents."""
    state = await pooled.running(await pooled.start("gpt", 0, 1))
    for number in (0, 1):
        here = pb.JobOnMachine(job=state.spec.name, run=state.run, generation=1)
        pooled.agents[number].answer(describe=pb.DescribeReply(machine=f"m{number}", jobs=[here]))
    await pooled.handle.terminate("by hand")

    refused = await (await pooled.start("bert", 1)).result()
    assert f"m1: job gpt-{pooled.queue} has it" in refused.headline
    assert (await pooled.places())["m1"] == "active gpt"


def replacement(pooled: Pooled, state: JobState, *machines: str, id: str) -> ReplaceRequest:
    return ReplaceRequest(
        id=id,
        job=state.spec.name,
        run=state.run,
        evict=[
            Eviction(machine=machine, rule="sure-machine-fault", reason="xid-79", why="GPU 3 is lost")
            for machine in machines
        ],
        keep=[one for one in state.machines if one.name not in machines],
    )


@pytest.mark.history("pool")
async def test_an_evicted_machine_is_cleaned_once_its_job_has_left_it(pooled: Pooled) -> None:
    """Until then, its memory is kept. The incident stops the ranks, which then resume from their own memory."""
    job = await pooled.start("gpt", 0, 1)
    state = await pooled.running(job)
    left = pb.JobOnMachine(job=state.spec.name, run=state.run)
    pooled.agents[1].answer(describe=pb.DescribeReply(machine="m1", jobs=[left]))

    answer = await pooled.ask("replace", replacement(pooled, state, "m1", id="i/1"), Replaced)
    assert answer.machines["m1"].name == "m4"
    again = await pooled.ask("replace", replacement(pooled, state, "m1", id="i/1"), Replaced)
    assert again == answer
    looks = len(pooled.agents[1].asked("describe"))
    await pooled.handle.execute_update("evict", OperatorMove(machine="m2", operator="me"), result_type=str)
    await until(lambda: len(pooled.agents[1].asked("describe")) > looks)
    assert not pooled.agents[1].asked("release"), "ranks of the job may still step on m1, so it is not cleaned"

    await job.signal("incident_machines", args=[1, []])  # the job has no incident 1, so it ignores this
    await job.terminate("by hand")
    await pooled.move("evict", "m3")
    await until(lambda: bool(pooled.agents[1].asked("release")))
    one = await pooled.until_at("m1", "quarantined gpt")
    assert one.why == "xid-79: GPU 3 is lost"


async def test_a_job_that_lacks_machines_gets_newly_provisioned_ones(pooled: Pooled) -> None:
    pooled.at_most = COUNT + 2
    pooled.agents[5].answer(describe=AgentUnreachable("it starts"))
    pooled.scripted.evidence = gone("m1", "m2")
    policy = RecoveryPolicy(silence={"evict_s": 0.0}, evict={"at_least": 2})
    job = await pooled.start("gpt", 0, 1, 2, 3, policy=policy)
    await pooled.running(job)
    await job.execute_update("report", anomaly())
    await pooled.until(job, lambda state: state.status == "parked")

    starting = await pooled.until_at("m5", "provisioning")
    assert starting.why == "it is new"
    pooled.agents[5].answer(describe=pb.DescribeReply(machine="m5"))
    state = await pooled.until(job, lambda state: state.generation == 2 and state.status == "running")
    assert {machine.name for machine in state.machines} == {"m0", "m3", "m4", "m5"}
    assert pooled.grown[0] == COUNT + 1, "the cluster is asked for no more machines than the job lacks"
    await until(lambda: pooled.grown[-1] == COUNT + 2)  # then the cluster is asked for a standby, too


async def test_a_cluster_that_refuses_machines_is_reported_and_asked_again(pooled: Pooled) -> None:
    pooled.at_most, pooled.refuses = COUNT + 1, "no quota is left"
    pooled.scripted.evidence = gone("m1", "m2")
    job = await pooled.start("gpt", 0, 1, 2, 3, policy=RecoveryPolicy(silence={"evict_s": 0.0}, evict={"at_least": 2}))
    await pooled.running(job)
    await job.execute_update("report", anomaly())
    await until(lambda: len(pooled.grown) >= 2)  # the cluster refused, and was asked again
    assert set(pooled.grown) == {COUNT + 1}
    state = await pooled.until(pooled.handle, lambda state: "no quota" in state.provisioned)
    assert state.provisioned == "the cluster was asked for 6 machines: ClusterError: no quota is left"


async def until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110 - there is no event
        await asyncio.sleep(0.02)


NOT_WARM = pb.DescribeReply(machine="m4", warm=pb.WarmForkServer(problem="No module named 'torch'"))


@pytest.mark.parametrize(
    ("described", "fault"),
    [(AgentUnreachable("no power"), "does not answer"), (NOT_WARM, "no fork server is ready: No module named")],
)
async def test_a_machine_that_is_not_ready_replaces_none(pooled: Pooled, described: Any, fault: str) -> None:
    pooled.agents[4].answer(describe=described)
    job = await pooled.start("gpt", 0, 1)
    state = await pooled.running(job)
    await pooled.move("evict", "m2")
    await pooled.until(pooled.handle, lambda state: fault in state.machines["m4"].fault)
    answer = await pooled.ask("replace", replacement(pooled, state, "m1", id="i/1"), Replaced)
    assert answer.machines["m1"].name == "m3"


async def test_operators_take_machines_out_of_use_and_release_them(pooled: Pooled) -> None:
    await pooled.until_at("m4", "standby")
    assert await pooled.move("evict", "m0") == "m0 is cordoned"
    refused = await (await pooled.start("gpt", 0)).result()
    assert "m0: it is cordoned: a loud fan; 'everstep release m0' lets jobs have it" in refused.headline
    assert await pooled.move("release", "m0") == "m0 is free"
    await pooled.running(await pooled.start("gpt", 0))
    with pytest.raises(WorkflowUpdateFailedError) as raised:
        await pooled.move("evict", "m77")
    assert "there is no machine m77; there are m0, m1" in str(raised.value.cause)


async def test_a_machine_that_an_operator_takes_out_leaves_its_job(pooled: Pooled) -> None:
    job = await pooled.start("gpt", 0, 1)
    await pooled.running(job)
    assert "leaves job gpt" in await pooled.move("evict", "m1")

    await pooled.until(job, lambda state: [one.name for one in state.machines] == ["m0", "m4"])
    await pooled.until(job, lambda state: state.status == "running")
    one = await pooled.until_at("m1", "cordoned gpt")
    assert not one.wanted_out
    assert "prepare m4" in pooled.scripted.calls
    assert (await pooled.places())["m4"] == "active gpt"


async def test_the_pool_continues_as_new_when_its_history_is_long(pooled: Pooled) -> None:
    state = await pooled.running(await pooled.start("gpt", 0, 1))
    first = (await pooled.handle.describe()).run_id
    request = LeaseRequest(job=state.spec.name, run=state.run, machines=state.machines)
    while (await pooled.handle.describe()).run_id == first:
        assert not (await pooled.ask("lease", request, Leased)).refused
    assert (await pooled.places())["m0"] == "active gpt"
    assert (await pooled.handle.describe()).status is WorkflowExecutionStatus.RUNNING


async def test_the_page_shows_the_job_of_each_machine(pooled: Pooled) -> None:
    await pooled.running(await pooled.start("gpt", 0, 1))
    await pooled.move("evict", "m2")
    found: WorkflowMetadata = await pooled.handle.query("__temporal_workflow_metadata", result_type=WorkflowMetadata)
    page = str(found.current_details)
    assert "## 5 machines: 2 active, 1 cordoned, 1 free, 1 standby" in page
    assert "a loud fan" in page
    assert page.index("m2") < page.index("m0"), "machines that are out of use come first"


async def test_the_code_of_jobs_is_sent_to_idle_machines_once_and_tried_there(pooled: Pooled) -> None:
    code, tried = "ab" * 32, list[str]()

    def answers(number: int, reply: Any) -> None:
        def attempt(request: pb.TryCodeRequest) -> Any:
            tried.append(f"m{number} {request.job} {request.program.code[:2]}")
            return reply

        pooled.agents[number].answer(has_code=pb.HasCodeReply(digests=[code]), try_code=attempt)

    text = "Traceback\nModuleNotFoundError: No module named 'fast'\n(exit code 1)"
    answers(2, pb.TryCodeReply(outcome=pb.TryCodeReply.JOINED))
    answers(3, AgentError("no room"))
    answers(4, pb.TryCodeReply(outcome=pb.TryCodeReply.FAILED, text=text))
    job = await pooled.start("gpt", 0, 1, code=code)
    state = await pooled.running(job)
    await pooled.move("evict", "m3")  # this makes the pool poll its machines
    await pooled.until(pooled.handle, lambda pool: ready_on(pool) == ["m2", "m4"])
    await pooled.move("release", "m3")
    pool: PoolState = await pooled.until(pooled.handle, lambda pool: ready_on(pool) == ["m2", "m3", "m4"])
    found = {name: list(one.ready.values()) for name, one in pool.machines.items()}
    assert found["m2"] == [""]
    assert found["m3"][0].partition(": ")[0] == state.spec.name
    assert "no room" in found["m3"][0]
    assert found["m4"] == [f"{state.spec.name}: ModuleNotFoundError: No module named 'fast'"]
    assert sorted(tried) == [f"m{number} {state.spec.name} ab" for number in (2, 3, 4)]
    assert pool.spare == 3
    page = await pooled.handle.query("__temporal_workflow_metadata", result_type=WorkflowMetadata)
    assert "ModuleNotFoundError" in page.current_details
    assert (await pooled.running(job)).incident_count == 0
