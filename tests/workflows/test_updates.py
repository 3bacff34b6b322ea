"""Updates of a job's code are requested, tried, applied at once or with a recovery, and rolled back."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from temporalio.client import WorkflowUpdateFailedError
from temporalio.exceptions import ApplicationError

from activities.agents.check_version import VersionChecked
from activities.agents.confirm_steps import ConfirmSteps
from activities.agents.restore_checkpoints import RestoreCheckpoints
from activities.agents.stop_ranks import StopRanks
from activities.make_version import MakeVersion, VersionMade
from everstep.model.evidence import Evidence, RankExit
from everstep.model.incident import IncidentReport, Symptom
from everstep.model.job_state import JobState, incident_workflow_id
from everstep.model.launch import Confirmation
from everstep.model.state_copy import Restored
from everstep.model.version import JobVersion, VersionStatus
from tests.rank_ends import exited
from tests.workflows.conftest import Jobs, anomaly, exits, held
from tests.workflows.test_restore import m1_empty
from workflows.job import JobWorkflow
from workflows.updates import Updates

ADA = {"operator": "ada", "reason": "a better loss"}
LAZY = {"code": "/home/ada/gpt", **ADA}
URGENT = {**LAZY, "urgency": "urgent"}


async def running(jobs: Jobs, **policy: Any) -> Any:
    """Start a job, and wait until it runs its first version."""
    return await jobs.running(**policy)


async def ask(handle: Any, request: dict[str, Any]) -> str:
    return str(await handle.execute_update(JobWorkflow.update, request))


def version(state: JobState, number: int) -> JobVersion:
    return next(one for one in state.versions if one.number == number)


async def until_status(jobs: Jobs, handle: Any, number: int, status: str) -> JobState:
    return await jobs.until(
        handle, lambda state: any(one.number == number and one.status == status for one in state.versions)
    )


def stopped(given: StopRanks) -> Evidence:
    """Answer a stop with evidence that all ranks lived until they were stopped at step 20."""
    ends = [
        RankExit(rank=rank, machine=f"m{rank}", signal=9, stopped_by_us=True, completed_steps=20) for rank in (0, 1)
    ]
    return Evidence(generation=given.generation, exits=ends, held=held(20))


def raised(given: StopRanks) -> Evidence:
    """Answer a stop with evidence that rank 1 raised an exception at step 20."""
    ends = [
        exited(rank=1, machine="m1", code=1, time_ns=1, completed_steps=20, exception="KeyError: 'loss'"),
        RankExit(rank=0, machine="m0", signal=9, stopped_by_us=True, completed_steps=20),
    ]
    return Evidence(generation=given.generation, exits=ends, held=held(20))


def fails(code: str) -> Any:
    """Return a confirmation that fails for this code, as if its ranks raised before their first step."""

    def confirmation(given: ConfirmSteps) -> Confirmation:
        ok = given.job.spec.code != code
        return Confirmation(generation=given.launched.generation, ok=ok, reason="stepped" if ok else "rank 1 died")

    return confirmation


def reports(jobs: Jobs) -> list[IncidentReport]:
    return [note.report for note in jobs.cluster.notes if note.report]


async def test_an_urgent_update_is_tried_and_applied_at_the_end_of_a_step(jobs: Jobs) -> None:
    jobs.cluster.evidence = stopped
    handle = await running(jobs)
    assert await ask(handle, URGENT) == "v2 is made and checked; it is applied as soon as it passed its checks"
    state = await jobs.until_runs(handle, 2)
    calls = jobs.cluster.calls
    assert calls[calls.index("make /home/ada/gpt") :][:5] == [
        "make /home/ada/gpt", "check 2", "align 1", "stop 1", "launch 2 from 20"
    ]  # fmt: skip
    assert [launch.job.spec.code for launch in jobs.cluster.launches] == ["", "/home/ada/gpt"]
    assert (state.spec.version, state.spec.code, state.failures) == (2, "/home/ada/gpt", [])
    assert version(state, 1).ranges == [(1, 0, 20)]
    assert version(state, 2).ranges == [(2, 20, -1)]
    assert (version(state, 1).status, version(state, 2).status) == (VersionStatus.REPLACED, VersionStatus.RUNNING)
    [report] = reports(jobs)
    assert (report.resolution, report.version, report.lost_steps) == ("update", 2, 0)
    assert report.headline.startswith("Done in ")
    assert "lost 0 steps: update to v2" in report.headline
    assert "by ada: a better loss" in report.headline


async def test_a_lazy_update_rides_on_the_next_recovery(jobs: Jobs) -> None:
    handle = await running(jobs)
    assert await ask(handle, LAZY) == "v2 is made and checked; it is applied with the next recovery, or in 24 h"
    await until_status(jobs, handle, 2, VersionStatus.PENDING)
    await handle.execute_update(JobWorkflow.report, anomaly())
    state = await jobs.until_runs(handle, 2)
    assert (state.spec.version, len(state.incidents), "align 1" in jobs.cluster.calls) == (2, 1, False)
    [report] = reports(jobs)
    assert report.resolution == "update"
    assert report.headline.endswith("by update to v2, lost 0 steps: rank 1 on m1 ended by SIGKILL")
    assert [failure.symptom for failure in state.failures] == [Symptom.CRASH]


async def test_it_is_forced_at_the_end_of_its_window(jobs: Jobs) -> None:
    jobs.cluster.evidence = stopped
    handle = await running(jobs)
    await ask(handle, LAZY | {"window_h": 1 / 3600})
    state = await jobs.until_runs(handle, 2)
    assert (state.spec.version, state.incidents[0].resolution) == (2, "update")


async def test_one_that_waits_is_forced_sooner_where_somebody_asks_for_it_with_a_shorter_window(jobs: Jobs) -> None:
    jobs.cluster.evidence = stopped
    handle = await running(jobs)
    await ask(handle, LAZY)
    await until_status(jobs, handle, 2, VersionStatus.PENDING)
    await ask(handle, {"version": 2, "window_h": 1 / 3600, **ADA})
    state = await jobs.until_runs(handle, 2)
    assert (state.spec.version, state.incidents[0].resolution) == (2, "update")


async def test_what_fails_where_it_is_tried_costs_the_job_nothing(jobs: Jobs) -> None:
    jobs.cluster.checked = lambda given: VersionChecked(refused="m1: ModuleNotFoundError: No module named 'gptt'")
    handle = await running(jobs)
    await ask(handle, URGENT)
    state = await until_status(jobs, handle, 2, VersionStatus.REFUSED)
    assert (state.generation, state.status, state.incidents) == (1, "running", [])
    assert "No module named 'gptt'" in version(state, 2).why
    assert "refused: m1: ModuleNotFoundError: No module named 'gptt'" in await jobs.page(handle)


async def test_what_cannot_be_made_is_refused_with_the_reason(jobs: Jobs) -> None:
    def too_large(given: MakeVersion) -> VersionMade:
        raise ApplicationError("data.bin has 3 GB", type="ConfigError", non_retryable=True)

    jobs.cluster.made = too_large
    handle = await running(jobs)
    await ask(handle, URGENT)
    state = await until_status(jobs, handle, 2, VersionStatus.REFUSED)
    assert (version(state, 2).why, state.generation) == ("data.bin has 3 GB", 1)


async def test_the_same_signal_three_times_is_one_update(jobs: Jobs) -> None:
    jobs.cluster.evidence = stopped
    handle = await running(jobs)
    for _ in range(3):
        await handle.signal(JobWorkflow.update_by_signal, URGENT)
    state = await jobs.until_runs(handle, 2)
    await handle.signal(JobWorkflow.update_by_signal, URGENT)
    assert await ask(handle, URGENT) == f"requested before: {version(state, 2).name} is running"
    assert [one.number for one in state.versions] == [1, 2]


@pytest.mark.parametrize(
    ("nonsense", "why"),
    [
        ([], "send one object"),
        (["v3"], "send one object"),
        ([URGENT, URGENT], "send one object"),
        ([{"codes": "/x"}], "'codes': there is no such field"),
        ([{"code": "gpt"}], "give the absolute path"),
        ([{"urgency": "soon"}], "urgency is 'soon'"),
        ([{"version": 7}], "there is no v7; there are v1 (running)"),
        ([{"cancel": 1}], "v1 is not waiting"),
        ([{"rollback": True}], "no version ran before v1"),
    ],
)
async def test_nonsense_is_rejected_and_shown(jobs: Jobs, nonsense: list[Any], why: str) -> None:
    handle = await running(jobs)
    with pytest.raises(WorkflowUpdateFailedError) as refused:
        await handle.execute_update("update", args=nonsense)
    assert why in str(refused.value.cause)
    await handle.signal("update", args=nonsense)
    state = await jobs.until(handle, lambda state: bool(state.rejected))
    assert why in state.rejected[0]
    assert why in await jobs.page(handle)
    assert (state.status, state.generation) == ("running", 1)


async def test_several_that_wait_come_with_one_restart(jobs: Jobs) -> None:
    handle = await running(jobs)
    await ask(handle, LAZY)
    await ask(handle, LAZY | {"code": "/home/ada/gpt-b"})
    await until_status(jobs, handle, 2, VersionStatus.PENDING)
    await until_status(jobs, handle, 3, VersionStatus.PENDING)
    await handle.execute_update(JobWorkflow.report, anomaly())
    state = await jobs.until_runs(handle, 2)
    assert (state.spec.version, version(state, 2).status) == (3, VersionStatus.SUPERSEDED)
    assert version(state, 2).ranges == []


async def test_one_that_waits_is_withdrawn(jobs: Jobs) -> None:
    handle = await running(jobs)
    await ask(handle, LAZY)
    await until_status(jobs, handle, 2, VersionStatus.PENDING)
    assert await ask(handle, {"cancel": 2, **ADA}) == "v2 is withdrawn"
    await handle.execute_update(JobWorkflow.report, anomaly())
    state = await jobs.until_runs(handle, 2)
    assert (state.spec.version, version(state, 2).status) == (1, VersionStatus.WITHDRAWN)


async def test_what_is_withdrawn_while_state_is_restored_does_not_come(jobs: Jobs) -> None:
    may_go_on = asyncio.Event()

    async def restored(given: RestoreCheckpoints) -> Restored:
        await may_go_on.wait()
        return Restored(moved=given.copies)

    jobs.cluster.evidence, jobs.cluster.restored = m1_empty, restored
    handle = await running(jobs)
    await ask(handle, LAZY)
    await until_status(jobs, handle, 2, VersionStatus.PENDING)
    await handle.execute_update(JobWorkflow.report, anomaly())
    while not any(call.startswith("restore") for call in jobs.cluster.calls):  # noqa: ASYNC110 - there is no event
        await asyncio.sleep(0.02)
    assert await ask(handle, {"cancel": 2, **ADA}) == "v2 is withdrawn"
    name = (await handle.query(JobWorkflow.current_state)).spec.name
    incident = jobs.client.get_workflow_handle(incident_workflow_id(name, 1))
    while "EVENT_TYPE_WORKFLOW_EXECUTION_SIGNALED" not in (await incident.fetch_history()).to_json():  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    may_go_on.set()
    state = await jobs.until_runs(handle, 2)
    assert (state.spec.version, version(state, 2).status) == (1, VersionStatus.WITHDRAWN)
    [report] = reports(jobs)
    assert (report.resolution, report.version) == ("reattempt", 1)


async def test_what_is_withdrawn_while_an_incident_is_opened_reaches_it(jobs: Jobs) -> None:
    """The job knows its incident as open only after the incident may have begun to work."""
    state = await (await running(jobs)).query(JobWorkflow.current_state)
    updates, sent = Updates(state, show=lambda: None), list[tuple[Any, ...]]()

    async def signal(*given: Any) -> None:
        sent.append(given)

    incident: Any = SimpleNamespace(signal=signal)
    updates.incident_opened(incident, state.versions)
    assert not updates.under_way, "the incident was started with these versions"
    started_with, state.versions = state.versions, [version(state, 1).model_copy(update={"why": "withdrawn"})]
    updates.incident_opened(incident, started_with)
    while updates.under_way:  # noqa: ASYNC110 - there is no event
        await asyncio.sleep(0)
    assert sent == [("versions", state.versions)]


@pytest.mark.history("job-rolled-back", "incident-rolled-back")
async def test_a_version_that_fails_at_once_is_taken_back(jobs: Jobs) -> None:
    jobs.cluster.evidence = lambda given: stopped(given) if given.generation == 1 else raised(given)
    jobs.cluster.confirmation = fails("/home/ada/gpt")
    handle = await running(jobs)
    await ask(handle, URGENT)
    state = await jobs.until_runs(handle, 3)
    assert [launch.job.spec.code for launch in jobs.cluster.launches] == ["", "/home/ada/gpt", ""]
    assert (state.spec.version, state.spec.code, len(state.incidents)) == (1, "", 1)
    assert version(state, 2).status == VersionStatus.SUSPECT
    assert "requested by ada, 1 file changed: it failed before its first step: KeyError" in version(state, 2).why
    [report] = reports(jobs)
    assert (report.resolution, report.version) == ("rollback", 1)
    assert "back to v1: v2, requested by ada" in "\n".join(note.text for note in jobs.cluster.notes)
    assert version(state, 1).ranges == [(1, 0, 20), (3, 20, -1)]

    # The same code is refused, unless it is requested by its version number.
    await ask(handle, URGENT | {"operator": "bob"})
    state = await until_status(jobs, handle, 3, VersionStatus.REFUSED)
    assert "it is the same as v2, which was rolled back" in version(state, 3).why
    jobs.cluster.evidence, jobs.cluster.confirmation = stopped, fails("nothing")
    await ask(handle, {"version": 2, "urgency": "urgent", **ADA})
    state = await jobs.until_runs(handle, 4)
    assert (state.spec.version, version(state, 2).status) == (2, VersionStatus.RUNNING)


async def test_a_version_that_fails_later_in_its_first_steps_is_taken_back(jobs: Jobs) -> None:
    jobs.cluster.evidence = stopped
    handle = await running(jobs)
    await ask(handle, URGENT)
    await jobs.until_runs(handle, 2)
    jobs.cluster.evidence = raised
    await handle.execute_update(JobWorkflow.report, anomaly(2, symptom=Symptom.EXCEPTION))
    state = await jobs.until_runs(handle, 3)
    assert (state.spec.version, state.incidents[1].resolution) == (1, "rollback")


async def test_a_machine_that_fails_is_not_held_against_a_new_version(jobs: Jobs) -> None:
    jobs.cluster.evidence = stopped
    handle = await running(jobs)
    await ask(handle, URGENT)
    await jobs.until_runs(handle, 2)
    jobs.cluster.evidence = lambda given: Evidence(generation=given.generation, exits=exits(21), held=held(20))
    await handle.execute_update(JobWorkflow.report, anomaly(2))
    state = await jobs.until_runs(handle, 3)
    assert (state.spec.version, state.incidents[1].resolution) == (2, "reattempt")
    await handle.execute_update(JobWorkflow.report, anomaly(3))
    state = await jobs.until_runs(handle, 4)
    assert (state.spec.version, state.incidents[2].resolution) == (1, "rollback"), (
        "the version failed twice in its first steps"
    )


async def test_an_operator_takes_a_version_back(jobs: Jobs) -> None:
    jobs.cluster.evidence = stopped
    handle = await running(jobs)
    await ask(handle, URGENT)
    await jobs.until_runs(handle, 2)
    said = await ask(handle, {"rollback": True, "urgency": "urgent", **ADA})
    assert said == "the job goes back to v1; it is applied as soon as it passed its checks"
    state = await jobs.until_runs(handle, 3)
    assert (state.spec.version, version(state, 2).status) == (1, VersionStatus.SUSPECT)
    assert version(state, 2).why == "rolled back by ada: a better loss"


async def test_an_urgent_update_brings_a_parked_job_back_and_a_lazy_one_waits(jobs: Jobs) -> None:
    jobs.cluster.evidence = raised
    handle = await running(jobs, retry={"max_failures_at_step": 1})
    await handle.execute_update(JobWorkflow.report, anomaly(symptom=Symptom.EXCEPTION))
    await jobs.until(handle, lambda state: state.status == "parked")
    await ask(handle, LAZY)
    await until_status(jobs, handle, 2, VersionStatus.PENDING)
    await asyncio.sleep(0.3)
    assert (await handle.query(JobWorkflow.current_state)).status == "parked"
    await ask(handle, URGENT | {"code": "/home/ada/gpt-b"})
    state = await jobs.until(handle, lambda state: state.status == "running")
    assert (state.spec.version, state.spec.code) == (3, "/home/ada/gpt-b")
    assert version(state, 2).status == VersionStatus.SUPERSEDED


async def test_what_comes_while_an_incident_is_open_goes_with_it(jobs: Jobs) -> None:
    jobs.cluster.blocked.add("stop 1")
    handle = await running(jobs)
    await handle.execute_update(JobWorkflow.report, anomaly())
    await jobs.until(handle, lambda state: state.status == "recovering")
    await ask(handle, URGENT)
    await until_status(jobs, handle, 2, VersionStatus.PENDING)
    await asyncio.sleep(0.3)
    jobs.cluster.blocked.clear()
    state = await jobs.until_runs(handle, 2)
    assert (state.spec.version, len(state.incidents)) == (2, 1)


async def test_a_job_of_before_there_were_versions_takes_updates(jobs: Jobs) -> None:
    jobs.cluster.evidence = stopped
    handle = await running(jobs)
    state = await handle.query(JobWorkflow.current_state)
    old = state.model_copy(update={"versions": [], "spec": state.spec.model_copy(update={"version": 0})})
    await handle.terminate()
    handle = await jobs.client.start_workflow(
        JobWorkflow.run, old.model_copy(update={"status": "running"}), id=handle.id, task_queue=jobs.queue
    )
    await ask(handle, URGENT)
    state = await jobs.until_runs(handle, 2)
    assert (state.spec.version, version(state, 1).steady) == (2, True)


def noted(jobs: Jobs, number: int) -> list[str]:
    """Return the states of a version in the ledger, in order, without repeats."""
    heard = [str(one.status) for entry in jobs.cluster.records for one in entry.versions if one.number == number]
    return [status for before, status in zip(["", *heard], heard, strict=False) if status != before]


async def test_each_version_is_noted_in_the_ledger_as_it_changes(jobs: Jobs) -> None:
    """The ledger has each status of a version, and how it ended with the job."""
    jobs.cluster.evidence = stopped
    handle = await running(jobs)
    await ask(handle, URGENT)
    await jobs.until_runs(handle, 2)
    jobs.cluster.checked = lambda given: VersionChecked(refused="no module")
    await ask(handle, LAZY | {"code": "/home/ada/broken"})
    await until_status(jobs, handle, 3, VersionStatus.REFUSED)
    jobs.cluster.checked = lambda given: VersionChecked()
    await ask(handle, LAZY | {"code": "/home/ada/other"})
    await until_status(jobs, handle, 4, VersionStatus.PENDING)
    await ask(handle, {"cancel": 4, **ADA})
    await ask(handle, LAZY | {"code": "/home/ada/late"})
    await until_status(jobs, handle, 5, VersionStatus.PENDING)
    await handle.signal(JobWorkflow.stop, {"operator": "ada"})
    await handle.result()

    last = {one.number: one for entry in jobs.cluster.records for one in entry.versions}
    assert [(one.number, one.status) for one in last.values()] == [
        (1, "replaced"), (2, "running"), (3, "refused"), (4, "withdrawn"), (5, "withdrawn")
    ]  # fmt: skip
    assert noted(jobs, 1) == ["running", "replaced"]
    assert noted(jobs, 3) == ["checking", "refused"]
    assert noted(jobs, 4)[-2:] == ["pending", "withdrawn"]
    assert (last[1].ranges, last[1].ended) == ([(1, 0, 20)], "replaced by v2")
    assert (last[2].ranges, last[2].ended) == ([(2, 20, -1)], "the job stopped by ada")
    assert (last[3].why, last[5].why) == ("no module", "the job stopped by ada")
    assert last[2].request.reason == "a better loss"


async def test_what_a_ledger_that_is_away_missed_it_hears_at_the_end(jobs: Jobs) -> None:
    handle = await running(jobs)
    jobs.cluster.blocked.add("records")
    await ask(handle, LAZY)
    state = await until_status(jobs, handle, 2, VersionStatus.PENDING)
    assert state.status == "running"
    jobs.cluster.blocked.clear()
    await handle.signal(JobWorkflow.stop, {"operator": "ada"})
    await handle.result()
    [ended] = [entry for entry in jobs.cluster.records if entry.outcome]
    assert {one.number: one.status for one in ended.versions} == {1: "running", 2: "withdrawn"}
