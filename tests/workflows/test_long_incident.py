"""An incident is resumed many times. Its history must stay short, and its state must be kept."""

from __future__ import annotations

import time
from typing import Any

import pytest
from temporalio.client import WorkflowHandle, WorkflowHistory
from temporalio.worker import Replayer

from activities.agents.stop_ranks import StopRanks
from activities.payloads import DATA_CONVERTER
from activities.read_closed_incident import read_closed
from everstep.model.evidence import Evidence
from everstep.model.finding import Finding, MachineFinding
from everstep.model.incident import CLOSED_OUTSIDE
from everstep.model.job_state import JobState, incident_workflow_id
from everstep.model.launch import Confirmation
from tests.workflows.conftest import anomaly, exits, held
from workflows.job import JobWorkflow
from workflows.registry import WORKFLOWS, sandbox

SUGGESTED = 100
"""The number of events after which the server of the tests suggests to continue as new."""
RESUMES = 6


def failing(given: Any) -> Confirmation:
    return Confirmation(generation=given.launched.generation, ok=False, reason="a rank died again")


async def resumed_again_and_again(jobs: Any, resumes: int) -> tuple[Any, Any]:
    """Return a parked job whose incident was resumed a number of times without success."""
    jobs.cluster.confirmation = failing
    job = await jobs.start(retry={"max_attempts": 1})
    await job.execute_update(JobWorkflow.report, anomaly())
    incident = jobs.client.get_workflow_handle(incident_workflow_id(job.id.removeprefix("job/"), 1))
    for resumed in range(resumes):
        await jobs.until(job, lambda state: state.status == "parked")
        launches = len([call for call in jobs.cluster.calls if call.startswith("launch")])
        assert launches == resumed + 2
        await incident.signal("resume", {"operator": f"ada {resumed}"})
        await jobs.until(
            job, lambda state, n=launches: len([one for one in jobs.cluster.calls if one.startswith("launch")]) > n
        )
    await jobs.until(job, lambda state: state.status == "parked")
    return job, incident


async def runs_of(jobs: Any, incident: WorkflowHandle[Any, Any]) -> list[WorkflowHistory]:
    """Return the histories of all runs of an incident, the newest first."""
    found, run = [], (await incident.describe()).run_id
    while run:
        history = await jobs.client.get_workflow_handle(incident.id, run_id=run).fetch_history()
        found.append(history)
        run = history.events[0].workflow_execution_started_event_attributes.continued_execution_run_id
    return found


@pytest.mark.history("incident-continued")
async def test_many_resumes_make_many_short_histories_and_one_report(jobs: Any) -> None:
    job, incident = await resumed_again_and_again(jobs, RESUMES)
    jobs.cluster.confirmation = type(jobs.cluster)().confirmation
    await incident.signal("resume", {"operator": "grace"})
    state: JobState = await jobs.until(job, lambda state: state.status == "running")
    histories = await runs_of(jobs, incident)

    assert len(histories) > 2
    assert max(len(history.events) for history in histories) < 2 * SUGGESTED
    replayer = Replayer(workflows=WORKFLOWS, data_converter=DATA_CONVERTER, workflow_runner=sandbox())
    for history in histories:
        await replayer.replay_workflow(history)

    launches = [call for call in jobs.cluster.calls if call.startswith("launch")]
    assert launches == ["launch 1 from -1", *(f"launch {number} from 20" for number in range(2, RESUMES + 4))]
    assert (state.generation, state.incident_count) == (RESUMES + 3, 1)
    assert state.lineage == [(1, -1), *((number, 20) for number in range(2, RESUMES + 4))]
    assert state.incidents[0].resolution == "resumed by operator"
    report = await incident.result()
    assert report["failures"][0]["generation"] == 1
    assert len(report["failures"]) == RESUMES + 2
    told = " ".join(report["stages"])
    assert all(f"resumed by ada {number}" in told for number in range(RESUMES))
    positions = sorted(note.position for note in jobs.cluster.notes)
    assert positions == list(range(1, len(positions) + 1)), "each entry of the ledger has its own position"
    await job.execute_update(JobWorkflow.finished, state.generation)
    assert (await job.result()).outcome == "finished"


async def test_reattempts_are_counted_on_after_a_continue_as_new(jobs: Any) -> None:
    jobs.cluster.confirmation = failing
    jobs.cluster.evidence = lambda given: Evidence(generation=given.generation, exits=exits(20), held=held(20))
    job = await jobs.start(
        retry={"max_attempts": 12, "max_failures_at_step": 100, "max_failures_without_progress": 100},
        ladder={"restarts": 0},
    )
    await job.execute_update(JobWorkflow.report, anomaly())
    await jobs.until(job, lambda state: state.status == "parked")
    incident = jobs.client.get_workflow_handle(incident_workflow_id(job.id.removeprefix("job/"), 1))

    assert "12 reattempts did not bring the job back" in (await incident.query("stage"))["found"]
    assert len(await runs_of(jobs, incident)) > 1
    assert jobs.cluster.calls[-1] == "stop 13"


async def test_all_launches_of_a_closed_incident_that_continued_as_new_are_known(jobs: Any) -> None:
    job, incident = await resumed_again_and_again(jobs, 4)
    assert len(await runs_of(jobs, incident)) > 1
    await incident.terminate()
    state = await jobs.until(job, lambda state: state.incident_count == 2 and state.status == "parked")
    left = await read_closed(jobs.client, incident.id)

    assert left.launches == [(number, 20) for number in range(2, 7)]
    assert (state.generation, state.incidents[0].resolution) == (6, CLOSED_OUTSIDE)
    assert jobs.cluster.calls[-1] == "stop 6"


async def test_an_abandoned_incident_gives_up_after_any_number_of_runs(jobs: Any) -> None:
    job, incident = await resumed_again_and_again(jobs, 4)
    await incident.signal("abandon", {"operator": "ada"})

    assert (await job.result()).outcome == "failed"
    assert jobs.cluster.calls[-2:] == ["stop 6", "release"]


async def test_an_incident_that_continued_as_new_while_parked_reports_the_xid_of_its_first_stop(jobs: Any) -> None:
    """The machine was inspected again after the first stop. So later stops do not report the Xid."""
    xid = Finding(inspection="kernel-log", reason="xid-79", item="GPU 0", text="it fell off the bus", sure=False)
    seen = MachineFinding(machine="m1", finding=xid.model_copy(update={"since_ns": time.time_ns()}))

    def evidence(given: StopRanks) -> Evidence:
        first = jobs.cluster.calls.count("stop 1") == 1 and given.generation == 1
        return Evidence(generation=given.generation, exits=exits(20), held=held(20), findings=[seen] if first else [])

    jobs.cluster.evidence = evidence
    job, incident = await resumed_again_and_again(jobs, 4)
    assert len(await runs_of(jobs, incident)) > 1
    jobs.cluster.confirmation = type(jobs.cluster)().confirmation
    await incident.signal("resume", {"operator": "grace"})
    await jobs.until(job, lambda state: state.status == "running")
    report = await incident.result()

    assert [(one["machine"], one["finding"]["reason"]) for one in report["findings"]] == [("m1", "xid-79")]
    assert "it fell off the bus (xid-79)" in report["headline"]
