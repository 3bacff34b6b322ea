"""An incident replays its job: on a real server, replayed from the start at every task."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from temporalio import activity
from temporalio.api.sdk.v1 import WorkflowMetadata
from temporalio.client import Client
from temporalio.exceptions import ApplicationError
from temporalio.worker import Worker

from activities import messages
from activities.heartbeat import heartbeating
from activities.messages import ConfirmInput, ReplayGroupInput
from everstep.decisions.replay.plan import plan_replay
from everstep.decisions.replay.spec import repeats_of
from everstep.model.incident import Confirmation, IncidentReport, Showing, Symptom
from everstep.model.job import JobSpec
from everstep.model.job_state import JobState, replay_workflow_id
from everstep.model.ladder import Rung
from everstep.model.machine import Machine
from everstep.model.recovery_policy import RecoveryPolicy
from everstep.model.replay import GroupRun, Replayed, ReplayFound, RunEnd
from tests.workflows.answers import computed_alike
from tests.workflows.conftest import Jobs, anomaly
from workflows.incident.workflow import IncidentWorkflow
from workflows.job import JobWorkflow
from workflows.messages import ReplayInput
from workflows.registry import WORKFLOWS, sandbox
from workflows.replay import ReplayWorkflow

WHO = {"operator": "ada"}
STEPS = Showing(kind="steps")
Group = Callable[[ReplayGroupInput], Awaitable[GroupRun]]


def broken_on(machine: str) -> Callable[[ReplayGroupInput], GroupRun]:
    """Every group with the machine breaks."""

    def run(given: ReplayGroupInput) -> GroupRun:
        found = computed_alike(given)
        if machine not in found.machines:
            return found
        return found.model_copy(update={"end": RunEnd.CRASHED, "why": f"rank 0 on {machine} ended by SIGSEGV"})

    return run


def in_vain(*evicted: str) -> Callable[[ConfirmInput], Confirmation]:
    """No restart comes to a step, as long as one of these machines is in the job."""

    def confirmation(given: ConfirmInput) -> Confirmation:
        there = any(machine.name in evicted for machine in given.machines)
        ok = given.launched.generation == 1 or not there
        return Confirmation(
            generation=given.launched.generation, ok=ok, reason="stepped" if ok else "rank 1 died", showing=STEPS
        )

    return confirmation


async def struck(jobs: Jobs, **policy: Any) -> Any:
    """A job that was seen to step, fails, and whose machines pass all tests."""
    jobs.cluster.confirmation = in_vain("m1")
    handle = await jobs.start(**policy)
    await jobs.until(handle, lambda state: state.status == "running" and state.showing.kind == "steps")
    await handle.execute_update(JobWorkflow.report, anomaly(symptom=Symptom.CRASH))
    return handle


async def replaying(jobs: Jobs, handle: Any) -> JobState:
    """Wait until the job is replayed; what a group does shows in no history of the job."""
    state = await jobs.until(handle, lambda state: bool(state.incidents) and state.incidents[-1].stage == "replay")
    deadline = time.monotonic() + 60.0
    while "replay row 0" not in jobs.cluster.calls:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)
    return state


def report_of(jobs: Jobs) -> IncidentReport:
    return next(note.report for note in reversed(jobs.cluster.notes) if note.report)


async def test_a_machine_that_only_the_job_itself_shows_is_found_and_leaves(jobs: Jobs) -> None:
    cluster = jobs.cluster
    cluster.replayed, cluster.standbys = broken_on("m1"), [Machine(name="m2", address="127.0.0.13:1")]
    handle = await struck(jobs)
    state = await jobs.until(handle, lambda state: state.status == "running" and state.generation > 1)
    report = report_of(jobs)
    assert [one.rung for one in report.tried] == [
        *(Rung.REATTEMPT, Rung.DIAGNOSE, Rung.REATTEMPT, Rung.REPLAY, Rung.REATTEMPT)
    ]
    assert (report.resolution, report.evicted) == ("eviction", ["m1"])
    assert [(one.rule, one.machine) for one in report.asked if one.yes] == [("failed-replay", "m1")]
    assert "m1 is the one machine in every group that showed a fault" in report.tried[3].found
    assert [machine.name for machine in state.machines] == ["m0", "m2"]
    last = [call for call in cluster.calls if call.startswith(("replay", "replace"))]
    assert sorted(last[:4]) == ["replay column 0", "replay column 1", "replay row 0", "replay row 1"]
    assert last[4:] == ["replace m1"]

    child = jobs.client.get_workflow_handle(replay_workflow_id(state.spec.name, 1, 1))
    shown: WorkflowMetadata = await child.query("__temporal_workflow_metadata", result_type=WorkflowMetadata)
    page = shown.current_details
    assert "## m1 is the one machine" in page and "**row 1**" in page and "as the others" in page


async def test_what_no_group_shows_is_not_called_clean_and_the_job_is_parked(jobs: Jobs) -> None:
    handle = await struck(jobs, replay_shows=1.0)
    state = await jobs.until(handle, lambda state: state.status == "parked")
    incident = jobs.client.get_workflow_handle(state.incidents[-1].id)
    await incident.signal("abandon", WHO)
    await handle.result()
    [tried] = [one for one in report_of(jobs).tried if one.rung == Rung.REPLAY]
    assert tried.found.startswith("not known: ") or tried.found.startswith("not reproduced")
    assert report_of(jobs).evicted == []


@pytest.mark.parametrize(
    ("policy", "why"),
    [({"ladder": {"replay": "off"}}, "replay: its mode is off"), ({"replay_machines": 2}, "there are no two groups")],
)
async def test_a_job_that_is_not_replayed_says_why(jobs: Jobs, policy: dict[str, Any], why: str) -> None:
    handle = await struck(jobs, max_failures_at_step=4, **policy)
    await jobs.until(handle, lambda state: state.status == "parked")
    assert not any(call.startswith("replay") for call in jobs.cluster.calls)
    assert any(why in note.text for note in jobs.cluster.notes)


async def test_an_incident_that_is_abandoned_leaves_no_replay(jobs: Jobs) -> None:
    jobs.cluster.blocked.add("replay row 0")
    handle = await struck(jobs)
    state = await replaying(jobs, handle)
    incident = jobs.client.get_workflow_handle(state.incidents[-1].id)
    assert (await incident.query(IncidentWorkflow.current_stage)).name == "replay"
    await incident.signal("abandon", WHO)
    await handle.result()
    child = jobs.client.get_workflow_handle(replay_workflow_id(state.spec.name, 1, 1), result_type=Replayed)
    assert (await child.result()).found is ReplayFound.INCOMPLETE
    assert not any("column" in call for call in jobs.cluster.calls)


async def test_a_replay_that_somebody_ends_leaves_the_incident_going_on(jobs: Jobs) -> None:
    jobs.cluster.blocked.add("replay row 0")
    handle = await struck(jobs)
    state = await replaying(jobs, handle)
    await jobs.client.get_workflow_handle(replay_workflow_id(state.spec.name, 1, 1)).terminate("by hand")
    await jobs.until(handle, lambda state: state.status == "parked")
    assert any(note.stage == "replay" and "ended from outside" in note.text for note in jobs.cluster.notes)


# The replay itself.


async def replayed(temporal: Client, machines: int, group: Group, **policy: Any) -> tuple[Replayed, Counter[str]]:
    """Replay a job of so many machines; also how often each group was begun."""
    begun: Counter[str] = Counter()

    @activity.defn(name=messages.REPLAY_GROUP)
    async def replay_group(given: ReplayGroupInput) -> GroupRun:
        begun[f"{given.group}/{given.repeat}"] += 1
        return await group(given)

    queue = f"q-{uuid.uuid4().hex[:8]}"
    spec = JobSpec(name="gpt", script="/job.py", machines=machines, policy=RecoveryPolicy(**policy))
    names = [Machine(name=f"m{x}", address=f"127.0.0.1:{x + 1}") for x in range(machines)]
    async with Worker(
        temporal,
        task_queue=queue,
        workflows=list(WORKFLOWS),
        activities=[replay_group],
        workflow_runner=sandbox(),
        max_cached_workflows=0,
    ):
        found: Replayed = await temporal.execute_workflow(
            ReplayWorkflow.run,
            ReplayInput(job="gpt", spec=spec, machines=names, run="r1"),
            id=f"replay/{queue}",
            task_queue=queue,
        )
    return found, begun


async def test_a_worker_that_dies_in_the_middle_of_a_phase_repeats_no_group_that_is_over(temporal: Client) -> None:
    """The one of row 2 says no more, as one that was killed: only its group begins again."""
    dead = asyncio.Event()

    async def group(given: ReplayGroupInput) -> GroupRun:
        if given.group == "row 2" and activity.info().attempt == 1:
            await dead.wait()
        async with heartbeating():
            found = computed_alike(given)
            return found.model_copy(update={"losses": [given.group]}) if "m5" in found.machines else found

    found, begun = await replayed(temporal, 8, group)
    dead.set()
    assert (found.found, found.suspects) == (ReplayFound.ONE, ["m5"])
    assert begun.pop("row 2/1") == 2
    assert set(begun.values()) == {1} and len(begun) == 7


async def test_phases_are_repeated_while_nothing_shows_and_no_longer(temporal: Client) -> None:
    async def later(given: ReplayGroupInput) -> GroupRun:
        found = computed_alike(given)
        wrong = "m3" in found.machines and given.repeat == 2
        return found.model_copy(update={"losses": [given.group]}) if wrong else found

    policy = {"replay_shows": 0.4, "replay_miss": 0.01}
    assert repeats_of(RecoveryPolicy(**policy)) > 2
    found, begun = await replayed(temporal, 8, later, **policy)
    assert (found.found, found.suspects, found.repeats) == (ReplayFound.ONE, ["m3"], 2)
    assert len(begun) == 16


async def test_groups_that_share_a_machine_do_not_run_at_once(temporal: Client) -> None:
    running, most = Counter[str](), list[int]()

    async def group(given: ReplayGroupInput) -> GroupRun:
        names = [machine.name for machine in given.machines]
        running.update(names)
        most.append(max(running.values()))
        await asyncio.sleep(0.2)
        running.subtract(names)
        found = computed_alike(given)
        return found.model_copy(update={"losses": [given.group]}) if "m0" in names else found

    found, _ = await replayed(temporal, 7, group, replay_machines=2)
    assert any(len(phase.waves) > 1 for phase in plan_replay(7, 2).phases)
    assert (found.found, found.suspects) == (ReplayFound.ONE, ["m0"])


async def test_a_group_that_cannot_be_run_accuses_nobody(temporal: Client) -> None:
    async def group(given: ReplayGroupInput) -> GroupRun:
        if given.group == "row 0":
            raise ApplicationError("no room", non_retryable=True)
        return computed_alike(given)

    found, _ = await replayed(temporal, 4, group, replay_shows=1.0, replay_s=1.0)
    assert (found.found, found.suspects) == (ReplayFound.INCOMPLETE, []) and "row 0" in found.text
