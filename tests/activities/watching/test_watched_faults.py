"""A fault of a machine goes from its agent to a watcher and then to workflows. None is lost or reported twice."""

from __future__ import annotations

import asyncio
from pathlib import Path

from activities.ledger.ledger import Ledger
from activities.ledger.machine_events import EventWriter
from activities.watching.acknowledger import Acknowledger
from activities.watching.watcher import Watcher
from agent.client import AgentClients
from agent.reporting.observations import OF_NO_JOB
from agent.v1 import agent_pb2 as pb
from tests.activities.watching.conftest import Place, cancelled_at_the_end, worker_of
from tests.activities.watching.test_job_view import S, show, watched
from tests.activities.watching.test_machine_findings import finding, hear
from workflows.job import JobWorkflow

HOT = pb.Finding(inspection="gpu", reason="gpu-hot", verdict="faulty", item="GPU 3", text="hot", since_ns=1)
RUNS = [pb.RankProgress(rank=0, generation=1, alive=True)]


async def test_an_agent_keeps_a_fault_until_the_job_has_accepted_it(place: Place, tmp_path: Path) -> None:
    """The agent keeps the fault even if all workers die when it is in the ledger but no job has accepted it yet."""
    agent, job = place.agents[0], await place.start("faulty", 1)
    agent.shown["faulty"] = RUNS
    await place.until_watched(1)
    ledger, pool = Ledger.open(f"sqlite:///{tmp_path}/ledger.db"), AgentClients()
    events = EventWriter(ledger)
    async with cancelled_at_the_end(Watcher(place.client, pool, place.queue, events.accept).run(), events.run()):
        await place.until_watched(2)
        await place.worker.shutdown()
        agent.publish(machine_finding=pb.MachineFinding(finding=HOT))
        while not ledger.machine_events():  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.05)
        await asyncio.sleep(1.5)  # the watcher reports the fault now, but no worker runs that could accept it
        assert agent.machine_acknowledged == 0
        async with worker_of(place.client, place.queue, place.cluster):
            while not agent.machine_acknowledged:  # noqa: ASYNC110 - there is no event
                await asyncio.sleep(0.05)
            [incident] = (await job.query(JobWorkflow.current_state)).incidents
            assert incident.headline.endswith("m0: GPU 3: hot (gpu-hot)")
            await job.signal(JobWorkflow.stop, {"operator": "test"})
            await job.result()
    await pool.close()
    ledger.close()


async def test_a_job_gets_a_fault_that_was_active_before_its_start(place: Place) -> None:
    agent, job = place.agents[0], await place.start("later", 1)
    agent.active = [HOT]
    agent.shown["later"] = RUNS
    while not (await job.query(JobWorkflow.current_state)).incidents:  # noqa: ASYNC110 - there is no event
        await asyncio.sleep(0.05)
    pool = AgentClients()
    async with cancelled_at_the_end(Watcher(place.client, pool, place.queue).run()):
        await place.until_watched(2)
        while agent.open("observe") < 2:  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.05)
        await asyncio.sleep(2)
    [incident] = (await job.query(JobWorkflow.current_state)).incidents
    assert incident.headline.endswith("m0: GPU 3: hot (gpu-hot)")
    await pool.close()
    await job.signal(JobWorkflow.stop, {"operator": "test"})
    await job.result()


async def test_a_fault_is_kept_until_all_jobs_on_its_machine_accepted_it() -> None:
    one, other, pool = watched(), watched(), AgentClients()
    telling = Acknowledger(pool, one, {"job/one": one, "job/other": other})
    for job in (one, other):
        show(job, 100 * S, 20)
    hear(one, finding(7), 100 * S)
    for told in one.verdicts(110 * S):
        one.accepted(told, 110 * S)  # type: ignore[arg-type]  # none of these verdicts is the end of a job
    assert telling._up_to("m1", OF_NO_JOB) == 0, "the other job's view has not heard of the fault"
    hear(other, finding(7), 100 * S)
    assert telling._up_to("m1", OF_NO_JOB) == 6, "the other job's workflow has not accepted the fault"
    for told in other.verdicts(110 * S):
        other.accepted(told, 110 * S)  # type: ignore[arg-type]
    assert telling._up_to("m1", OF_NO_JOB) == 7
    await pool.close()
