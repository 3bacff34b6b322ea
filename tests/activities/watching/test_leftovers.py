"""What a job leaves on a real agent when its workflow is over."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from datetime import timedelta
from pathlib import Path

import structlog.testing
from temporalio.client import Client, WorkflowQueryFailedError
from temporalio.service import RPCError
from temporalio.worker import Worker

from activities.watching.leftovers import LeftoverCleaner
from agent.client import AgentClients
from agent.fake import FakeAgent
from agent.v1 import agent_pb2 as pb
from everstep.errors import AgentUnreachable
from everstep.model.job import JobSpec
from everstep.model.job_state import JobState, job_workflow_id
from everstep.model.machine import Machine
from tests.activities.spoken import serving
from tests.agent.agents import Job, alive, running_agent
from tests.workflows.other_release import UNREADABLE, OtherJob
from workflows.incident.workflow import IncidentWorkflow
from workflows.job import JobWorkflow
from workflows.registry import WORKFLOWS, sandbox


async def look(cleanup: LeftoverCleaner) -> None:
    """Poll once, and wait until all jobs are handled."""
    await asyncio.gather(*await cleanup.look())


async def test_ranks_of_a_terminated_job_are_ended_once_their_agent_answers(temporal: Client, tmp_path: Path) -> None:
    queue = f"q-{uuid.uuid4().hex[:8]}"
    async with (
        running_agent(tmp_path) as agent,
        Worker(temporal, task_queue=queue, workflows=list(WORKFLOWS), workflow_runner=sandbox()),
    ):
        job, pool = Job(agent, "import time; time.sleep(600)\n", ranks=1), AgentClients()
        await job.prepare()
        rank = (await job.launch()).ranks[0].pid
        spec = JobSpec(name=job.name, script=str(job.path))
        handle = await temporal.start_workflow(
            JobWorkflow.run,
            JobState(spec=spec, machines=[Machine(name="m1", address=agent.address)], generation=1),
            id=job_workflow_id(job.name),
            task_queue=queue,
        )
        await handle.query(JobWorkflow.current_state)
        cleanup = LeftoverCleaner(temporal, pool, queue, settle=timedelta(0), again_s=0.1)
        await look(cleanup)
        assert alive(rank), "the job runs, so its rank must not be ended"
        await handle.terminate("by hand")
        agent.kill()
        await look(cleanup)
        assert alive(rank), "the agent is dead, so nothing can end the rank"
        await agent.start()
        while alive(rank):
            await look(cleanup)
            await asyncio.sleep(0.1)
        assert not agent.left()
        await pool.close()


async def test_what_is_left_where_a_newer_run_is_not_is_ended_and_the_newer_one_is_left_alone(
    temporal: Client, tmp_path: Path
) -> None:
    queue, older, newer = f"q-{uuid.uuid4().hex[:8]}", "20260101-000000.000-a", "20260102-000000.000-b"
    async with (
        running_agent(tmp_path / "m1", machine="m1") as first,
        running_agent(tmp_path / "m2", machine="m2") as second,
        Worker(temporal, task_queue=queue, workflows=list(WORKFLOWS), workflow_runner=sandbox()),
    ):
        here = Job(first, "import time; time.sleep(600)\n", ranks=1)
        there, pool = Job(second, "import time; time.sleep(600)\n", ranks=1), AgentClients()
        there.name = here.name
        machines = [Machine(name="m1", address=first.address), Machine(name="m2", address=second.address)]

        async def begin(run: str, jobs: list[Job]) -> list[int]:
            pids = []
            for job in jobs:
                request = job.launch_request(request_id=f"launch-{run}")
                request.run = run
                preparing = pb.PrepareRequest(request_id=f"prepare-{run}", job=job.name, run=run)
                await job.agent.client.prepare(preparing, timeout_s=60)
                pids.append((await job.agent.client.launch(request, timeout_s=60)).ranks[0].pid)
            spec = JobSpec(name=here.name, script=str(here.path), machines=len(jobs))
            state = JobState(spec=spec, machines=machines[: len(jobs)], generation=1, run=run)
            handle = await temporal.start_workflow(
                JobWorkflow.run, state, id=job_workflow_id(here.name), task_queue=queue
            )
            assert (await handle.query(JobWorkflow.current_state)).run == run
            return pids

        cleanup = LeftoverCleaner(temporal, pool, queue, settle=timedelta(0), again_s=0.1)
        left = (await begin(older, [here, there]))[1]
        second.kill()
        await temporal.get_workflow_handle(job_workflow_id(here.name)).terminate("its machine is gone")
        [runs] = await begin(newer, [here])
        await look(cleanup)
        assert alive(left), "the agent is dead, so nothing can end the rank of the older run"
        await second.start()
        while alive(left):
            await look(cleanup)
            await asyncio.sleep(0.1)

        assert alive(runs), "the newer run has its rank on another machine, where it must not be ended"
        await temporal.get_workflow_handle(job_workflow_id(here.name)).terminate("enough")
        while alive(runs):
            await look(cleanup)
            await asyncio.sleep(0.1)
        await pool.close()


def asked(agents: list[FakeAgent]) -> list[int]:
    """Return how often each machine was asked which jobs it has."""
    return [len(agent.asked("describe")) for agent in agents]


async def over(temporal: Client, name: str, queue: str, state: object) -> None:
    """Make a job that has ended. ``state`` is its answer to queries."""
    handle = await temporal.start_workflow("Job", state, id=job_workflow_id(name), task_queue=queue)
    while True:
        with contextlib.suppress(RPCError, WorkflowQueryFailedError):
            await handle.query("state", rpc_timeout=timedelta(seconds=2))
            break
    await handle.terminate("by hand")


async def test_only_the_missing_machine_is_asked_again_and_less_and_less_often(temporal: Client) -> None:
    agents = [FakeAgent(describe=one) for one in (pb.DescribeReply(), AgentUnreachable("away"), pb.DescribeReply())]
    queue, pool = f"q-{uuid.uuid4().hex[:8]}", AgentClients()
    async with (
        serving(agents) as machines,
        Worker(temporal, task_queue=queue, workflows=list(WORKFLOWS), workflow_runner=sandbox()),
    ):
        spec = JobSpec(name="gone", script="/x.py", machines=3)
        await over(temporal, "gone", queue, JobState(spec=spec, machines=machines, generation=1))
        cleanup = LeftoverCleaner(temporal, pool, queue, settle=timedelta(0), again_s=0.1)
        looks = 0
        while asked(agents)[1] < 4:
            await look(cleanup)
            looks += 1
            await asyncio.sleep(0.02)

        assert asked(agents)[::2] == [1, 1]
        assert looks > 8, "the missing machine is asked four times, with pauses of 0.1, 0.2 and 0.4 s"
        agents[1].answer(describe=pb.DescribeReply())
        before = asked(agents)[1]
        while asked(agents)[1] == before:
            await look(cleanup)
            await asyncio.sleep(0.02)
        for _ in range(20):
            await look(cleanup)
        assert asked(agents) == [1, before + 1, 1], "nothing is left on any machine, so no machine is asked any more"
    await pool.close()


async def test_a_job_whose_workflow_was_reset_goes_on(temporal: Client) -> None:
    """A reset closes a run of the workflow. The newest run continues the same run of the job on the same machines."""
    agent = FakeAgent(
        describe=pb.DescribeReply(jobs=[pb.JobOnMachine(job="reset", run="r1")]), release=pb.ReleaseReply()
    )
    queue, pool = f"q-{uuid.uuid4().hex[:8]}", AgentClients()
    async with (
        serving([agent]) as machines,
        Worker(temporal, task_queue=queue, workflows=list(WORKFLOWS), workflow_runner=sandbox()),
    ):
        state = JobState(spec=JobSpec(name="reset", script="/x.py"), machines=machines, generation=1, run="r1")
        await over(temporal, "reset", queue, state)
        handle = await temporal.start_workflow(JobWorkflow.run, state, id=job_workflow_id("reset"), task_queue=queue)
        await handle.query(JobWorkflow.current_state)
        cleanup = LeftoverCleaner(temporal, pool, queue, settle=timedelta(0), again_s=0.1)
        checked = 0
        while checked < 3:
            checked += len(begun := await cleanup.look())
            await asyncio.gather(*begun)
            await asyncio.sleep(0.05)
        assert agent.asked("release") == []
        await handle.terminate("by hand")
    await pool.close()


async def test_replays_of_a_job_that_is_over_are_ended_too(temporal: Client) -> None:
    jobs = [pb.JobOnMachine(job=name, run="r1") for name in ("gone~row-0", "gone~column-1", "gone-too", "other~row-0")]
    agent = FakeAgent(describe=pb.DescribeReply(jobs=jobs), release=pb.ReleaseReply())
    queue, pool = f"q-{uuid.uuid4().hex[:8]}", AgentClients()
    async with (
        serving([agent]) as machines,
        Worker(temporal, task_queue=queue, workflows=list(WORKFLOWS), workflow_runner=sandbox()),
    ):
        spec = JobSpec(name="gone", script="/x.py")
        await over(temporal, "gone", queue, JobState(spec=spec, machines=machines, generation=1, run="r1"))
        cleanup = LeftoverCleaner(temporal, pool, queue, settle=timedelta(0), again_s=0.1)
        while not agent.asked("release"):  # the server lists ended workflows a moment later
            await look(cleanup)
    assert [(one.job, one.run) for one in agent.asked("release")] == [("gone~row-0", "r1"), ("gone~column-1", "r1")]
    await pool.close()


async def test_a_job_that_cannot_be_read_holds_up_no_other_one_and_is_said_once(temporal: Client) -> None:
    """A job whose state cannot be read is logged only once."""
    agents, queue, pool = [FakeAgent(describe=pb.DescribeReply())], f"q-{uuid.uuid4().hex[:8]}", AgentClients()
    async with (
        serving(agents) as machines,
        Worker(temporal, task_queue=queue, workflows=[OtherJob, IncidentWorkflow], workflow_runner=sandbox()),
    ):
        good = JobState(spec=JobSpec(name="well", script="/x.py"), machines=machines, generation=1)
        for name, state in (("odd1", UNREADABLE), ("well", good), ("odd2", UNREADABLE)):
            await over(temporal, name, queue, state)
        cleanup = LeftoverCleaner(temporal, pool, queue, settle=timedelta(0), again_s=0.01)
        with structlog.testing.capture_logs() as logs:
            while asked(agents) == [0]:
                await look(cleanup)
            for _ in range(20):
                await look(cleanup)
                await asyncio.sleep(0.02)
    said = [line["workflow"] for line in logs if line["event"].startswith("what a closed job left")]

    assert sorted(said) == ["job/odd1", "job/odd2"]
    await pool.close()
