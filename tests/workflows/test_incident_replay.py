"""An incident replays its job. The server is real, and each task executes a workflow from its start."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from temporalio.api.sdk.v1 import WorkflowMetadata

from activities.agents.confirm_steps import ConfirmSteps
from activities.agents.replay_on_group import ReplayOnGroup
from everstep.model.incident import Symptom
from everstep.model.job_state import JobState, replay_workflow_id
from everstep.model.ladder import Rung
from everstep.model.launch import Confirmation, Showing
from everstep.model.machine import Machine
from everstep.model.replay import GroupRun, ReplayConclusion, Replayed, RunEnd
from tests.workflows.answers import computed_alike
from tests.workflows.conftest import Jobs, anomaly
from workflows.incident.workflow import IncidentWorkflow
from workflows.job import JobWorkflow

WHO = {"operator": "ada"}
STEPS = Showing(kind="steps")
Group = Callable[[ReplayOnGroup], Awaitable[GroupRun]]


def broken_on(machine: str) -> Callable[[ReplayOnGroup], GroupRun]:
    """Answer that each group with the machine crashes."""

    def run(given: ReplayOnGroup) -> GroupRun:
        found = computed_alike(given)
        if machine not in found.machines:
            return found
        return found.model_copy(update={"end": RunEnd.CRASHED, "why": f"rank 0 on {machine} ended by SIGSEGV"})

    return run


def in_vain(*evicted: str) -> Callable[[ConfirmSteps], Confirmation]:
    """Answer that no restart makes a step while one of these machines is in the job."""

    def confirmation(given: ConfirmSteps) -> Confirmation:
        there = any(machine.name in evicted for machine in given.job.machines)
        ok = given.launched.generation == 1 or not there
        return Confirmation(
            generation=given.launched.generation, ok=ok, reason="stepped" if ok else "rank 1 died", showing=STEPS
        )

    return confirmation


async def struck(jobs: Jobs, **policy: Any) -> Any:
    """Return a job that made steps and then failed. Its machines pass all tests."""
    jobs.cluster.confirmation = in_vain("m1")
    handle = await jobs.start(**policy)
    await jobs.until(handle, lambda state: state.status == "running" and state.showing.kind == "steps")
    await handle.execute_update(JobWorkflow.report, anomaly(symptom=Symptom.CRASH))
    return handle


async def replaying(jobs: Jobs, handle: Any, *, times: int = 1) -> JobState:
    """Wait until row 0 was started ``times`` times in the replay. The job's history does not show what groups do."""
    state = await jobs.until(handle, lambda state: bool(state.incidents) and state.incidents[-1].stage == "replay")
    deadline = time.monotonic() + 60.0
    while jobs.cluster.calls.count("replay row 0") < times:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)
    return state


@pytest.mark.history("incident-replayed")
async def test_a_replay_finds_a_faulty_machine_which_then_leaves(jobs: Jobs) -> None:
    cluster = jobs.cluster
    cluster.replayed, cluster.standbys = broken_on("m1"), [Machine(name="m2", address="127.0.0.13:1")]
    handle = await struck(jobs)
    state = await jobs.until(handle, lambda state: state.status == "running" and state.generation > 1)
    report = jobs.report
    assert [one.rung for one in report.tried] == [
        *(Rung.REATTEMPT, Rung.DIAGNOSE, Rung.REATTEMPT, Rung.REPLAY, Rung.REATTEMPT)
    ]
    assert (report.resolution, report.evicted) == ("eviction", ["m1"])
    assert [(one.rule, one.machine) for one in report.asked if one.yes] == [("failed-replay", "m1")]
    assert "m1 is the only machine in every group that showed a fault" in report.tried[3].found
    assert [machine.name for machine in state.machines] == ["m0", "m2"]
    last = [call for call in cluster.calls if call.startswith(("replay", "replace"))]
    both = ["replay column 0", "replay column 1", "replay row 0", "replay row 1"]
    assert sorted(last[:4]) == sorted(last[4:8]) == both, "groups that crashed run again, and must crash again"
    assert last[8:] == ["replace m1"]

    child = jobs.client.get_workflow_handle(replay_workflow_id(state.spec.name, 1, 1))
    shown: WorkflowMetadata = await child.query("__temporal_workflow_metadata", result_type=WorkflowMetadata)
    page = shown.current_details
    assert "## m1 is the only machine" in page and "**row 1**" in page and "the same as the other groups" in page
    incident = jobs.client.get_workflow_handle(state.incidents[-1].id)
    shown = await incident.query("__temporal_workflow_metadata", result_type=WorkflowMetadata)
    assert f"/workflows/{child.id.replace('/', '%2F')})" in shown.current_details


async def test_a_job_whose_fault_no_group_shows_is_parked(jobs: Jobs) -> None:
    handle = await struck(jobs, replay={"fault_share": 1.0})
    state = await jobs.until(handle, lambda state: state.status == "parked")
    incident = jobs.client.get_workflow_handle(state.incidents[-1].id)
    await incident.signal("abandon", WHO)
    await handle.result()
    [tried] = [one for one in jobs.report.tried if one.rung == Rung.REPLAY]
    assert tried.found.startswith("not known: ") or tried.found.startswith("not reproduced")
    assert jobs.report.evicted == []


@pytest.mark.parametrize(
    ("policy", "why"),
    [
        ({"ladder": {"modes": {"replay": "off"}}}, "replay: its mode is off"),
        ({"replay": {"machines": 2}}, "there are no two groups"),
    ],
)
async def test_the_reason_why_a_job_is_not_replayed_is_given(jobs: Jobs, policy: dict[str, Any], why: str) -> None:
    handle = await struck(jobs, retry={"max_failures_at_step": 4}, **policy)
    await jobs.until(handle, lambda state: state.status == "parked")
    assert not any(call.startswith("replay") for call in jobs.cluster.calls)
    assert any(why in note.text for note in jobs.cluster.notes)


async def test_an_abandoned_incident_ends_its_replay(jobs: Jobs) -> None:
    jobs.cluster.blocked.add("replay row 0")
    handle = await struck(jobs)
    state = await replaying(jobs, handle)
    incident = jobs.client.get_workflow_handle(state.incidents[-1].id)
    assert (await incident.query(IncidentWorkflow.current_stage)).name == "replay"
    await incident.signal("abandon", WHO)
    await handle.result()
    child = jobs.client.get_workflow_handle(replay_workflow_id(state.spec.name, 1, 1), result_type=Replayed)
    assert (await child.result()).found is ReplayConclusion.INCOMPLETE
    assert not any("column" in call for call in jobs.cluster.calls)


async def test_an_abandoned_replay_in_a_later_run_returns_its_result(jobs: Jobs) -> None:
    """Each repeat is a separate run of the replay's workflow. The incident refers to the workflow's id."""

    def group(given: ReplayOnGroup) -> GroupRun:
        if (given.group, given.repeat) == ("column 1", 1):
            jobs.cluster.blocked.add("replay row 0")
        return computed_alike(given)

    jobs.cluster.replayed = group
    handle = await struck(jobs, replay={"fault_share": 0.2})
    state = await replaying(jobs, handle, times=2)
    incident = jobs.client.get_workflow_handle(state.incidents[-1].id)
    await incident.signal("abandon", WHO)
    await handle.result()
    child = jobs.client.get_workflow_handle(replay_workflow_id(state.spec.name, 1, 1), result_type=Replayed)
    found = await child.result()
    assert (found.found, found.repeats) == (ReplayConclusion.NOTHING, 2) and "in 2 runs" in found.text
    assert (await child.describe()).raw_description.workflow_execution_info.parent_execution.workflow_id == incident.id
    assert jobs.cluster.calls.count("replay column 1") == 1


async def test_an_incident_continues_after_its_replay_was_terminated(jobs: Jobs) -> None:
    jobs.cluster.blocked.add("replay row 0")
    handle = await struck(jobs)
    state = await replaying(jobs, handle)
    await jobs.client.get_workflow_handle(replay_workflow_id(state.spec.name, 1, 1)).terminate("by hand")
    await jobs.until(handle, lambda state: state.status == "parked")
    assert any(note.stage == "replay" and "ended from outside" in note.text for note in jobs.cluster.notes)
