"""Each event of a real workflow is announced once, even if several workers poll for events."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import structlog.testing
from temporalio import workflow
from temporalio.client import Client, WorkflowHandle
from temporalio.worker import Worker

from activities.deliver_notice import DeliverNotice
from activities.notices.announcer import Announcer
from activities.notices.settings import NoticeSettings, Receiver
from activities.registry import function
from everstep.decisions.notices import PacedJob
from everstep.model.machine import Machine
from everstep.model.pool import PoolMachine, PoolPlace, PoolState, pool_workflow_id
from everstep.model.save_pace import SavePace
from tests.activities.notices.http_receiver import HttpReceiver, serving
from tests.activities.performing import tools
from tests.workflows.conftest import Jobs, ScriptedCluster, anomaly
from tests.workflows.test_evict import STANDBYS, gone, sure_fault
from workflows.incident.workflow import IncidentWorkflow
from workflows.job import JobWorkflow
from workflows.registry import WORKFLOWS, sandbox

UI = "http://127.0.0.1:8233/"


@dataclass
class Told:
    """Jobs on a scripted cluster, with a receiver that gets all notices."""

    client: Client
    queue: str
    jobs: Jobs
    pager: HttpReceiver
    settings: NoticeSettings

    def announcer(self, **more: Any) -> Announcer:
        return Announcer(self.client, self.settings, self.queue, UI, **more)

    async def looked(self, *announcers: Announcer, count: int) -> list[dict[str, Any]]:
        """Poll until ``count`` notices have arrived, since Temporal lists workflows late. Returns all notices."""
        while len(self.pager.bodies) < count:
            await asyncio.gather(*(one.look() for one in announcers))
            await asyncio.sleep(0.1)
        return self.pager.bodies

    async def delivered(self) -> list[str]:
        """Return the ids of all deliveries that Temporal lists."""
        query = f'WorkflowType="Notice" AND TaskQueue="{self.queue}"'
        return [one.id async for one in self.client.list_workflows(query)]


@pytest.fixture
def pager() -> Iterator[HttpReceiver]:
    with serving() as found:
        yield found


@pytest.fixture
async def told(temporal: Client, pager: HttpReceiver) -> AsyncIterator[Told]:
    cluster, queue = ScriptedCluster(), f"q-{uuid.uuid4().hex[:8]}"
    settings = NoticeSettings(receiver=[Receiver(name="pager", url=pager.url)])
    async with Worker(
        temporal,
        task_queue=queue,
        workflows=[*WORKFLOWS, ScriptedPool],
        activities=[
            *cluster.activities,
            function(DeliverNotice, tools(notices=settings)),
        ],
        workflow_runner=sandbox(),
        max_cached_workflows=0,
    ):
        yield Told(temporal, queue, Jobs(temporal, cluster, queue), pager, settings)


async def parked(told: Told) -> WorkflowHandle[Any, Any]:
    """Start a job that loses a machine. It is parked, because there is no standby. Returns the job's handle."""
    told.jobs.cluster.evidence = gone("m1")
    handle = await told.jobs.start(silence={"evict_s": 0.0})
    await told.jobs.until(handle, lambda state: state.status == "running")
    await handle.execute_update(JobWorkflow.report, anomaly())
    await told.jobs.until(handle, lambda state: state.status == "parked")
    return handle


async def incident_of(told: Told, handle: WorkflowHandle[Any, Any]) -> WorkflowHandle[Any, Any]:
    state = await handle.query(JobWorkflow.current_state)
    return told.client.get_workflow_handle(state.incidents[-1].id)


async def test_several_announcers_announce_each_parking_once(told: Told) -> None:
    handle = await parked(told)
    first, second = told.announcer(), told.announcer()
    [body] = await told.looked(first, second, count=1)
    for announcer in (first, second, told.announcer()):
        await announcer.look()

    incident = await incident_of(told, handle)
    assert (body["kind"], body["incident"], body["cluster"]) == ("parked", incident.id, told.queue)
    assert body["link"] == f"{UI}namespaces/default/workflows/{incident.id.replace('/', '%2F')}"
    assert len(told.pager.bodies) == 1

    await incident.signal(IncidentWorkflow.resume, {"operator": "ada"})
    before = body["id"]
    _, again = await told.looked(first, second, count=2)
    assert again["kind"] == "parked"
    assert again["id"] != before, "the job was parked again, so this is another event"
    await incident.signal(IncidentWorkflow.abandon, {"operator": "ada"})
    *_, failed = await told.looked(first, second, count=3)
    assert (failed["kind"], failed["job"]) == ("job-failed", body["job"])
    await told.announcer().look()
    assert [one["kind"] for one in told.pager.bodies] == ["parked", "parked", "job-failed"]


async def test_a_receiver_gets_only_the_kinds_of_notices_that_it_wants(told: Told) -> None:
    deaf = NoticeSettings(receiver=[Receiver(name="pager", url=told.pager.url, kinds=["pool-empty"])])
    handle = await parked(told)
    await Announcer(told.client, deaf, told.queue).look()
    assert not [body for body in told.pager.bodies if body["kind"] == "parked"]
    await told.looked(told.announcer(), count=1)
    await handle.terminate()


async def test_the_breaker_is_announced_if_the_job_is_parked_for_it(told: Told) -> None:
    told.jobs.cluster.standbys, told.jobs.cluster.evidence = list(STANDBYS), gone("m1")
    handle = await told.jobs.start(evict={"share": 0.0, "at_least": 0}, silence={"evict_s": 0.0})
    await told.jobs.until(handle, lambda state: state.status == "running")
    await handle.execute_update(JobWorkflow.report, anomaly())
    await told.jobs.until(handle, lambda state: state.status == "parked")
    bodies = await told.looked(told.announcer(), count=2)

    assert {body["kind"] for body in bodies} == {"parked", "breaker-tripped"}
    assert all(body["machines"] == ["m1"] for body in bodies)
    await handle.terminate()


async def test_the_breaker_is_announced_if_the_job_continues(told: Told) -> None:
    told.jobs.cluster.standbys = list(STANDBYS)
    handle = await told.jobs.start(evict={"share": 0.0, "at_least": 0})
    await told.jobs.until(handle, lambda state: state.status == "running")
    await handle.execute_update(JobWorkflow.observe, sure_fault())
    [body] = await told.looked(told.announcer(), count=1)

    assert body["kind"] == "breaker-tripped"
    assert "1 machines of 2 would be evicted" in body["text"]
    await handle.terminate()


async def test_a_terminated_job_is_announced_and_a_stopped_job_is_not(told: Told) -> None:
    stopped, terminated = await told.jobs.start(), await told.jobs.start()
    for handle in (stopped, terminated):
        await told.jobs.until(handle, lambda state: state.status == "running")
    await stopped.signal(JobWorkflow.stop, {"operator": "ada"})
    await stopped.result()
    await terminated.terminate()
    [body] = await told.looked(told.announcer(), count=1)

    assert (body["kind"], f"job/{body['job']}") == ("job-failed", terminated.id)
    assert "it was terminated" in body["text"]


@workflow.defn(name="ScriptedPool", sandboxed=False)
class ScriptedPool:
    """A machine pool whose state a test chooses."""

    @workflow.init
    def __init__(self, state: PoolState) -> None:
        self.state = state

    @workflow.query(name="state")
    def current_state(self) -> PoolState:
        return self.state

    @workflow.signal(name="say")
    def say(self, state: PoolState) -> None:
        self.state = state

    @workflow.run
    async def run(self, state: PoolState) -> None:
        await workflow.wait_condition(lambda: False)


def machine(name: str, place: PoolPlace, *evicted_ns: int) -> PoolMachine:
    own = Machine(name=name, address=f"{name}:1")
    return PoolMachine(machine=own, place=place, since_ns=max(evicted_ns, default=1), evicted_ns=list(evicted_ns))


def pool(*machines: PoolMachine) -> PoolState:
    return PoolState(machines={one.machine.name: one for one in machines}, standbys=1, known=True)


async def test_missing_standbys_and_second_evictions_are_announced(told: Told) -> None:
    first, second = told.announcer(short_for_s=0.0), told.announcer(short_for_s=0.0)
    with structlog.testing.capture_logs() as logs:
        await first.look()
    assert logs == [], "a cluster without a pool causes no log"

    standby = machine("m1", PoolPlace.STANDBY)
    handle = await told.client.start_workflow(
        ScriptedPool.run, pool(standby), id=pool_workflow_id(told.queue), task_queue=told.queue
    )
    await first.look()
    now_ns = time.time_ns()
    out = machine("m1", PoolPlace.QUARANTINED, now_ns - 10**9, now_ns)
    await handle.signal(ScriptedPool.say, pool(out))
    patient = told.announcer()
    await patient.look()
    bodies = await told.looked(first, second, count=2)
    await asyncio.gather(first.look(), second.look(), patient.look())

    assert sorted(body["kind"] for body in bodies) == ["evicted-twice", "pool-empty"]
    assert all(body["machines"] == ["m1"] for body in bodies)
    assert len(await told.delivered()) <= 2
    await handle.terminate()


async def test_another_number_of_steps_between_saves_is_announced_once(told: Told) -> None:
    job = PacedJob("gpt", 1, SavePace(4, 8), save_s=4.2, step_s=0.6)
    first, second = (told.announcer(paced_jobs=lambda: [job]) for _ in range(2))
    (body,) = await told.looked(first, second, count=1)
    await first.look()
    assert (body["kind"], body["job"]) == ("saves-changed", "gpt")
    assert len(await told.delivered()) == 1
