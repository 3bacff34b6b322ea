"""Incidents are cancelled or terminated from outside, at each stage. The job keeps its copies."""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from temporalio.client import Client, WorkflowExecutionStatus, WorkflowHandle, WorkflowHistory
from temporalio.worker import Replayer, Worker

from activities.read_closed_incident import read_closed
from everstep.model.evidence import Evidence
from everstep.model.incident import CLOSED_OUTSIDE
from everstep.model.job_state import JobState, incident_workflow_id
from everstep.model.launch import Confirmation
from tests.workflows.asking import asked
from tests.workflows.conftest import Jobs, ScriptedCluster, anomaly, exits, held
from workflows.job import JobWorkflow
from workflows.registry import WORKFLOWS, sandbox

Close = Callable[[WorkflowHandle[Any, Any]], Awaitable[None]]


async def terminate(incident: WorkflowHandle[Any, Any]) -> None:
    await incident.terminate("too slow")


async def cancel(incident: WorkflowHandle[Any, Any]) -> None:
    await incident.cancel()
    async with asyncio.timeout(60.0):
        while (await incident.describe()).status is WorkflowExecutionStatus.RUNNING:  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.02)


def failing_first(given: Any) -> Confirmation:
    return Confirmation(
        generation=given.launched.generation,
        ok=given.launched.generation != 2,
        reason="",
        stepped_ns=1,
        completed_steps=21,
    )


STAGES = {
    "stop": {"stop 1"},
    "reattempt": {"launch 2"},
    "confirm": {"confirm 2"},
    "backoff": set[str](),
    "parked": set[str](),
}
"""Stage → the calls that do not return until the incident is closed."""


async def reach(jobs: Any, stage: str) -> tuple[Any, Any]:
    """Return a job whose first incident is at a stage. Also return this incident."""
    policy: dict[str, Any] = {}
    if stage == "backoff":
        jobs.cluster.confirmation = failing_first
        policy = {"retry": {"backoff_initial_s": 600.0, "backoff_max_s": 600.0}}
    if stage == "parked":
        jobs.cluster.confirmation, policy = failing_first, {"retry": {"max_attempts": 1}}
    jobs.cluster.blocked |= STAGES[stage]
    job = await jobs.start(**policy)
    await jobs.until(job, lambda state: state.status == "running")
    await job.execute_update(JobWorkflow.report, anomaly())
    incident = jobs.client.get_workflow_handle(incident_workflow_id(job.id.removeprefix("job/"), 1))
    await jobs.until(job, lambda state: bool(state.incidents))
    await asked(incident, "stage", lambda answer: answer["name"] == stage)
    for call in STAGES[stage]:
        while not any(one.startswith(call) for one in jobs.cluster.calls):  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.02)
    return job, incident


@pytest.mark.parametrize("close", [terminate, cancel])
@pytest.mark.parametrize("stage", [stage for stage in STAGES if stage != "confirm"])
async def test_the_job_waits_for_an_operator_and_keeps_its_copies(jobs: Any, stage: str, close: Close) -> None:
    job, incident = await reach(jobs, stage)
    await close(incident)
    jobs.cluster.blocked.clear()
    state: JobState = await jobs.until(job, lambda state: state.status == "parked" and state.incident_count == 2)

    launched = [int(call.split()[1]) for call in jobs.cluster.calls if call.startswith("launch")]
    assert [one.resolution for one in state.incidents] == [CLOSED_OUTSIDE, ""]
    assert state.incidents[0].headline.startswith("Terminated by" if close is terminate else "Cancelled by")
    assert jobs.cluster.calls[-1] == f"stop {max(launched)}", (
        "ranks that may run are stopped, and no memory is given back"
    )
    assert "release" not in jobs.cluster.calls
    parked = await jobs.client.get_workflow_handle(state.incidents[1].id).query("stage")
    assert parked["found"].startswith(f"{incident.id} was {'terminated' if close is terminate else 'cancelled'}")

    await jobs.client.get_workflow_handle(state.incidents[1].id).signal("resume", {"operator": "ada"})
    state = await jobs.until(job, lambda state: state.status == "running")

    assert jobs.cluster.calls[-2:] == [f"launch {max(launched) + 1} from 20", f"confirm {max(launched) + 1}"]
    assert state.incidents[1].resolution == "resumed by operator"
    assert (state.closed_outside, state.hold) == (0, "")
    closed = [note for note in jobs.cluster.notes if note.incident == incident.id and note.report]
    assert [note.report.resolution for note in closed] == [CLOSED_OUTSIDE], (
        "the ledger notes that the incident was closed from outside"
    )
    await job.signal(JobWorkflow.stop, {"operator": "ada"})
    await job.result()


@pytest.mark.parametrize("close", [terminate, cancel])
async def test_launched_ranks_continue_after_their_incident_was_closed(jobs: Any, close: Close) -> None:
    job, incident = await reach(jobs, "confirm")
    await close(incident)
    await jobs.until(job, lambda state: state.incidents[0].resolution == CLOSED_OUTSIDE)
    jobs.cluster.blocked.clear()
    state = await jobs.until(job, lambda state: state.status == "running")

    assert (state.generation, state.resume_step, state.lineage[-1]) == (2, 20, (2, 20))
    assert jobs.cluster.calls.count("stop 1") == 1
    assert not [call for call in jobs.cluster.calls if call in {"stop 2", "release"}]
    await job.execute_update(JobWorkflow.report, anomaly(2))
    state = await jobs.until(job, lambda state: state.generation == 3 and state.status == "running")
    assert [one.number for one in state.incidents] == [1, 2]
    await job.execute_update(JobWorkflow.finished, 3)
    assert (await job.result()).outcome == "finished"


def cancelled_while_it_tells(history: WorkflowHistory) -> WorkflowHistory:
    """Return a history in which the incident is cancelled while its signal to the job is under way.

    Temporal answers a signal within milliseconds. So this history is made from one in which the incident was cancelled
    later.
    """
    told = history.to_json_dict()
    events = told["events"]
    kinds = [event["eventType"].removeprefix("EVENT_TYPE_") for event in events]
    sent = len(kinds) - 1 - kinds[::-1].index("SIGNAL_EXTERNAL_WORKFLOW_EXECUTION_INITIATED")
    ended = kinds.index("WORKFLOW_EXECUTION_CANCEL_REQUESTED")
    # Some activities began in the part that is left out. Their ends are left out too.
    last = [event for event, kind in zip(events[ended:], kinds[ended:], strict=True) if "ACTIVITY" not in kind]
    told["events"] = [*events[: sent + 1], *last]
    new = {event["eventId"]: str(at) for at, event in enumerate(told["events"], start=1)}
    for event in told["events"]:
        event["eventId"] = new[event["eventId"]]
        for about in (value for key, value in event.items() if key.endswith("EventAttributes")):
            about.update({key: new[value] for key, value in about.items() if key.endswith("EventId") and value in new})
    return WorkflowHistory.from_json(history.workflow_id, told)


def quiet(history: WorkflowHistory) -> bool:
    """Return whether no task, activity or signal is under way. A part of it would otherwise be left out."""
    kinds = Counter(event["eventType"].removeprefix("EVENT_TYPE_") for event in history.to_json_dict()["events"])
    sent = kinds["SIGNAL_EXTERNAL_WORKFLOW_EXECUTION_INITIATED"]
    return (
        # A task that timed out was repeated. On a busy computer, the SDK may drop a task together with the run that it
        # evicts.
        kinds["WORKFLOW_TASK_SCHEDULED"] == sum(kinds[f"WORKFLOW_TASK_{how}"] for how in ("COMPLETED", "TIMED_OUT"))
        and kinds["ACTIVITY_TASK_SCHEDULED"] == kinds["ACTIVITY_TASK_COMPLETED"]
        and kinds["TIMER_STARTED"] > kinds["TIMER_FIRED"] + kinds["TIMER_CANCELED"]
        and sent == kinds["EXTERNAL_WORKFLOW_EXECUTION_SIGNALED"] > 0
    )


async def test_an_incident_that_is_cancelled_while_it_tells_its_job_something_ends(jobs: Any) -> None:
    job, incident = await reach(jobs, "parked")
    while not quiet(await incident.fetch_history()):  # noqa: ASYNC110 - there is no event
        await asyncio.sleep(0.02)
    await cancel(incident)
    history = cancelled_while_it_tells(await incident.fetch_history())
    replayer = Replayer(workflows=WORKFLOWS, data_converter=jobs.client.data_converter, workflow_runner=sandbox())

    await replayer.replay_workflow(history)

    await job.signal(JobWorkflow.stop, {"operator": "ada"})
    await job.result()


async def test_ranks_that_do_not_step_after_a_closed_incident_open_another_one(jobs: Any) -> None:
    def hung(given: Any) -> Confirmation:
        return failing_first(given).model_copy(update={"timed_out": True, "reason": "no step"})

    jobs.cluster.confirmation = hung
    job, incident = await reach(jobs, "confirm")
    await incident.terminate()
    await jobs.until(job, lambda state: state.incidents[0].resolution == CLOSED_OUTSIDE)
    jobs.cluster.blocked.clear()

    state = await jobs.until(job, lambda state: state.status == "running" and state.generation == 3)

    assert [one.resolution for one in state.incidents] == [CLOSED_OUTSIDE, "reattempt"]
    assert "release" not in jobs.cluster.calls
    await job.signal(JobWorkflow.stop, {"operator": "ada"})
    await job.result()


async def test_repeatedly_closed_incidents_are_opened_more_and_more_slowly(jobs: Any) -> None:
    job, incident = await reach(jobs, "stop")
    for number in range(1, 5):
        incident = jobs.client.get_workflow_handle(incident_workflow_id(job.id.removeprefix("job/"), number))
        stage = "parked" if number > 1 else ""
        await jobs.until(
            job, lambda state, n=number, s=stage: state.incident_count == n and state.incidents[-1].stage == s
        )
        await incident.terminate()
        jobs.cluster.blocked.clear()
        await jobs.until(job, lambda state, n=number: state.closed_outside == n)
    await job.signal(JobWorkflow.stop, {"operator": "ada"})

    assert (await job.result()).outcome == "stopped", (
        "the job stops even while it waits before it opens the next incident"
    )
    assert [call for call in jobs.cluster.calls if call.startswith("launch")] == ["launch 1 from -1"]


async def test_a_job_can_be_cancelled_after_its_incident_was_closed(jobs: Any) -> None:
    job, incident = await reach(jobs, "parked")
    await incident.terminate()
    await jobs.until(job, lambda state: state.incidents[0].resolution == CLOSED_OUTSIDE)
    await job.cancel()

    assert (await job.result()).outcome == "stopped"
    assert jobs.cluster.calls[-1] == "release"


@pytest.mark.parametrize("close", [terminate, cancel])
async def test_a_job_that_is_cancelled_together_with_its_incident_is_stopped(temporal: Client, close: Close) -> None:
    """One workflow task gets both events. This happens after a batch operation of the Web UI while no worker runs."""
    cluster, queue = ScriptedCluster(), f"q-{uuid.uuid4().hex[:8]}"

    def worker() -> Worker:
        return Worker(
            temporal,
            task_queue=queue,
            workflows=list(WORKFLOWS),
            activities=cluster.activities,
            workflow_runner=sandbox(),
            max_cached_workflows=0,
        )

    async with worker():
        job, incident = await reach(Jobs(temporal, cluster, queue), "parked")
    await (incident.terminate() if close is terminate else incident.cancel())
    await job.cancel()
    async with worker():
        assert (await job.result()).outcome == "stopped"
    assert cluster.calls[-1] == "release"


async def test_an_emptied_machine_is_remembered_after_its_incident_was_closed(jobs: Any) -> None:
    """A machine that came back empty reports this only once."""
    told = ["m1"]

    def evidence(given: Any) -> Evidence:
        return Evidence(
            generation=given.generation, exits=exits(20), held=held(20), emptied=[told.pop()] if told else []
        )

    jobs.cluster.evidence = evidence
    job, incident = await reach(jobs, "reattempt")
    await incident.terminate()
    state = await jobs.until(job, lambda state: state.status == "parked" and state.incident_count == 2)
    left = await read_closed(jobs.client, incident.id)

    assert state.emptied == [], "ranks were launched on m1 again, so it is not empty any more"
    assert (left.launches, left.resume_step, left.launched, left.emptied) == ([(2, 20)], 20, None, [])
    await job.signal(JobWorkflow.stop, {"operator": "ada"})
    await job.result()


async def test_a_deleted_incident_is_read_as_unknown(jobs: Any) -> None:
    left = await read_closed(jobs.client, "incident/no-such/0001")

    assert (left.known, left.launches) == (False, [])
