"""An incident climbs the ladder. The server is real, and each task executes a workflow from its start."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from temporalio.exceptions import ApplicationError

from activities.agents.confirm_steps import ConfirmSteps
from activities.agents.diagnose_machines import DiagnoseMachines
from activities.agents.stop_ranks import StopRanks
from everstep.model.diagnosis import BadLink, Diagnosis, MachineDiagnosis
from everstep.model.evidence import Evidence
from everstep.model.finding import Finding, Health
from everstep.model.incident import IncidentReport, Symptom
from everstep.model.ladder import Rung
from everstep.model.launch import Confirmation
from everstep.model.machine import Machine
from everstep.model.version import CodeVersion, JobVersion, VersionStatus
from tests.workflows import answers
from tests.workflows.conftest import Jobs, anomaly, exits, held
from workflows.incident.workflow import IncidentWorkflow
from workflows.job import JobWorkflow

STANDBYS = [Machine(name="m2", address="127.0.0.13:1")]
WHO = {"operator": "ada"}


def in_vain(times: int) -> Callable[[ConfirmSteps], Confirmation]:
    """Answer that the first ``times`` restarts make no step."""
    left: Iterator[int] = iter(range(times))

    def confirmation(given: ConfirmSteps) -> Confirmation:
        ok = given.launched.generation == 1 or next(left, None) is None
        return Confirmation(generation=given.launched.generation, ok=ok, reason="stepped" if ok else "rank 1 died")

    return confirmation


def other_bits(machine: str, *, sure: bool = True) -> Callable[[DiagnoseMachines], Diagnosis]:
    """Answer that one machine computes wrongly. ``sure``: whether this is sure."""
    finding = Finding(inspection="bitwise", reason="other-bits", text="other bits than 3 of 4 machines", sure=sure)

    def diagnosis(given: DiagnoseMachines) -> Diagnosis:
        bad = [MachineDiagnosis(machine=machine, verdict=Health.FAULTY, findings=[finding])]
        good = [one.name for one in given.machines if one.name != machine]
        fine = [MachineDiagnosis(machine=name, verdict=Health.HEALTHY) for name in good]
        return Diagnosis(machines=bad + fine, tests=given.tests)

    return diagnosis


async def struck(jobs: Jobs, symptom: Symptom = Symptom.CRASH, **policy: Any) -> Any:
    """Start a job and report a failure of it."""
    handle = await jobs.running(**policy)
    await handle.execute_update(JobWorkflow.report, anomaly(symptom=symptom))
    return handle


async def recovered(jobs: Jobs, handle: Any, generation: int) -> IncidentReport:
    await jobs.until_runs(handle, generation)
    return jobs.report


def tried(report: IncidentReport) -> list[Rung]:
    return [one.rung for one in report.tried]


def stood(given: StopRanks) -> Evidence:
    """Answer that no rank ended by itself."""
    ends = [end.model_copy(update={"stopped_by_us": True}) for end in exits(20)]
    return Evidence(generation=given.generation, exits=ends, held=held(20))


async def test_a_first_crash_leads_to_a_restart_without_tests(jobs: Jobs) -> None:
    handle = await struck(jobs)
    report = await recovered(jobs, handle, 2)
    assert (tried(report), report.resolution) == ([Rung.REATTEMPT], "reattempt")
    assert report.tried[0].found == "all stepped"
    assert jobs.cluster.diagnoses == []
    state = await jobs.until(handle, lambda state: True)
    assert [(one.rung, one.symptom, one.machine, one.step) for one in state.tried] == [("reattempt", "crash", "m1", 20)]


@pytest.mark.history("incident-diagnosed")
async def test_after_a_second_crash_machines_are_tested_and_the_faulty_one_leaves(jobs: Jobs) -> None:
    cluster = jobs.cluster
    cluster.confirmation, cluster.diagnosis, cluster.standbys = in_vain(1), other_bits("m1"), list(STANDBYS)
    handle = await struck(jobs)
    report = await recovered(jobs, handle, 3)

    assert (report.resolution, report.evicted) == ("eviction", ["m1"])
    assert [(one.rule, one.machine) for one in report.asked if one.yes] == [("failed-test", "m1")]
    assert tried(report) == [Rung.REATTEMPT, Rung.DIAGNOSE, Rung.REATTEMPT]
    found = report.tried[1].found
    assert "m1 is at fault: other bits than 3 of 4 machines (other-bits); 1 of 2 machines passed" in found
    assert (report.tried[1].why, report.tried[1].machine) == (
        "the cause is not known; reattempt did not help",
        "m1",
    )
    [given] = cluster.diagnoses
    state = await jobs.until(handle, lambda state: True)
    assert (given.job, given.run) == (state.spec.name, state.run)
    assert [machine.name for machine in state.machines] == ["m0", "m2"]
    calls = cluster.calls
    assert calls.index("diagnose") < calls.index("replace m1") < calls.index("launch 3 from 20")


async def test_a_loss_that_is_not_finite_leads_to_tests_at_once(jobs: Jobs) -> None:
    jobs.cluster.evidence = stood
    handle = await struck(jobs, Symptom.NOT_FINITE)
    report = await recovered(jobs, handle, 2)
    assert tried(report) == [Rung.DIAGNOSE, Rung.REATTEMPT]
    assert [stage.name for stage in report.timings][:4] == ["stop", "decide", "diagnose", "decide"]
    assert "bitwise" in jobs.cluster.diagnoses[0].tests and report.evicted == []


@pytest.mark.parametrize("why", ["nothing can be tested here", ""])
async def test_an_unknown_result_of_tests_evicts_no_machine(jobs: Jobs, why: str) -> None:
    def unknown(given: DiagnoseMachines) -> Diagnosis:
        if why:
            raise ApplicationError(why, non_retryable=True)
        found = Finding(inspection="bitwise", reason="test-unable", verdict=Health.UNKNOWN, text="no torch")
        machines = [
            MachineDiagnosis(machine=one.name, verdict=Health.UNKNOWN, findings=[found]) for one in given.machines
        ]
        return Diagnosis(machines=machines)

    jobs.cluster.evidence, jobs.cluster.diagnosis, jobs.cluster.standbys = stood, unknown, list(STANDBYS)
    handle = await struck(jobs, Symptom.NOT_FINITE)
    report = await recovered(jobs, handle, 2)
    assert (report.evicted, tried(report)) == ([], [Rung.DIAGNOSE, Rung.REATTEMPT])
    assert (why or "m0, m1 is not known, e.g. no torch") in report.tried[0].found


@pytest.mark.parametrize(("times", "evicted"), [(2, ["m1"]), (1, [])])
async def test_a_link_that_fails_two_tests_evicts_the_later_of_its_machines(
    jobs: Jobs, times: int, evicted: list[str]
) -> None:
    def cut(given: DiagnoseMachines) -> Diagnosis:
        links = [BadLink(machines=("m0", "m1"), test="nic", text="timed out")]
        seen = len(jobs.cluster.diagnoses) <= times
        return answers.all_healthy(given).model_copy(update={"tests": ["nic"], "links": links if seen else []})

    jobs.cluster.evidence, jobs.cluster.diagnosis, jobs.cluster.standbys = stood, cut, list(STANDBYS)
    handle = await struck(jobs, Symptom.NOT_FINITE)
    report = await recovered(jobs, handle, 2)
    assert [given.tests for given in jobs.cluster.diagnoses][1:] == [["nic"]]
    assert report.evicted == evicted
    asked = [one.why for one in report.asked if one.rule == "bad-link" and one.yes]
    assert len(asked) == len(evicted)
    assert all("the link between it and m0 does not work" in why and "over-eviction" in why for why in asked)
    assert "between m0 and m1: timed out (nic)" in report.tried[0].found or not evicted


async def test_an_unsure_fault_is_tested_twice(jobs: Jobs) -> None:
    answers = [other_bits("m1", sure=False), other_bits("m0", sure=False)]
    jobs.cluster.diagnosis = lambda given: answers.pop(0)(given)  # noqa: PLW0108 - each call takes the next answer
    jobs.cluster.evidence, jobs.cluster.standbys = stood, list(STANDBYS)
    handle = await struck(jobs, Symptom.NOT_FINITE)
    report = await recovered(jobs, handle, 2)
    assert report.evicted == [] and [given.tests for given in jobs.cluster.diagnoses][1] == ["bitwise"]
    assert "a second test did not confirm it" in report.tried[0].found


async def test_a_sure_fault_evicts_although_the_second_test_fails(jobs: Jobs) -> None:
    def once(given: DiagnoseMachines) -> Diagnosis:
        if len(jobs.cluster.diagnoses) > 1:
            raise ApplicationError("the tests took too long", non_retryable=True)
        first, second = (other_bits(name, sure=sure)(given) for name, sure in (("m0", False), ("m1", True)))
        return second.model_copy(update={"machines": [first.machines[0], second.machines[0]]})

    jobs.cluster.evidence, jobs.cluster.diagnosis, jobs.cluster.standbys = stood, once, list(STANDBYS)
    handle = await struck(jobs, Symptom.NOT_FINITE)
    report = await recovered(jobs, handle, 2)
    assert report.evicted == ["m1"] and "could not be tested a second time" in report.tried[0].found


async def test_the_next_incident_of_the_same_fault_begins_higher(jobs: Jobs) -> None:
    handle = await struck(jobs)
    await recovered(jobs, handle, 2)
    await handle.execute_update(JobWorkflow.report, anomaly(2))
    report = await recovered(jobs, handle, 3)
    assert tried(report) == [Rung.DIAGNOSE, Rung.REATTEMPT]


async def test_a_rung_that_has_to_be_approved_waits_for_an_operator(jobs: Jobs) -> None:
    jobs.cluster.evidence = stood
    handle = await struck(jobs, Symptom.NOT_FINITE, ladder={"modes": {"diagnose": "approve"}})
    state = await jobs.until(handle, lambda state: state.status == "parked")
    incident = jobs.client.get_workflow_handle(state.incidents[-1].id)
    shown = await incident.query(IncidentWorkflow.current_stage)
    assert "has to approve the next rung of the ladder, diagnose" in shown.found
    assert jobs.cluster.diagnoses == []
    said = await incident.execute_update("approve", WHO, result_type=str)
    assert said == f"diagnose may begin for job {state.spec.name}"
    report = await recovered(jobs, handle, 2)
    assert tried(report) == [Rung.DIAGNOSE, Rung.REATTEMPT]


async def test_an_operators_resume_skips_the_rung(jobs: Jobs) -> None:
    jobs.cluster.evidence = stood
    handle = await struck(jobs, Symptom.NOT_FINITE, ladder={"modes": {"diagnose": "approve"}})
    state = await jobs.until(handle, lambda state: state.status == "parked")
    await jobs.client.get_workflow_handle(state.incidents[-1].id).signal("resume", WHO)
    report = await recovered(jobs, handle, 2)
    assert report.resolution == "resumed by operator" and jobs.cluster.diagnoses == []


# Code that ran well for a long time, and then fails.

SECOND = {
    "versions": [
        JobVersion(
            number=number,
            runs=CodeVersion(script="/job.py", code=f"code{number}"),
            status=VersionStatus.RUNNING if number == 2 else VersionStatus.REPLACED,
            ranges=[(number - 1, 10 * number, -1 if number == 2 else 20)],
            steady=True,
            began_ns=1,
        )
        for number in (1, 2)
    ]
}


async def with_two_versions(jobs: Jobs, confirmation: Callable[[ConfirmSteps], Confirmation]) -> Any:
    handle = await jobs.running(SECOND)
    jobs.cluster.confirmation = confirmation
    await handle.execute_update(JobWorkflow.report, anomaly())
    return handle


def fails_with(*versions: int) -> Callable[[ConfirmSteps], Confirmation]:
    """Answer that no restart of these versions makes a step."""

    def confirmation(given: ConfirmSteps) -> Confirmation:
        ok = given.job.spec.version not in versions
        return Confirmation(generation=given.launched.generation, ok=ok, reason="stepped" if ok else "rank 1 died")

    return confirmation


async def test_code_that_ran_well_is_rolled_back_if_nothing_else_helped(jobs: Jobs) -> None:
    handle = await with_two_versions(jobs, fails_with(2))
    report = await recovered(jobs, handle, 4)
    assert tried(report) == [Rung.REATTEMPT, Rung.DIAGNOSE, Rung.REATTEMPT, Rung.ROLLBACK]
    assert report.resolution == "rollback" and report.version == 1
    state = await jobs.until(handle, lambda state: True)
    [suspect] = [one for one in state.versions if one.number == 2]
    assert suspect.status == VersionStatus.SUSPECT
    assert "reattempt and diagnose did not help: SIGKILL at step 20" in suspect.why


async def test_rolled_back_code_is_cleared_if_the_job_fails_without_it_too(jobs: Jobs) -> None:
    handle = await with_two_versions(jobs, fails_with(1, 2))
    state = await jobs.until(handle, lambda state: state.status == "parked")
    incident = jobs.client.get_workflow_handle(state.incidents[-1].id)
    assert "4 times at step 20" in (await incident.query(IncidentWorkflow.current_stage)).found
    await incident.signal("abandon", WHO)
    await handle.result()
    [report] = [note.report for note in jobs.cluster.notes if note.report]
    assert tried(report) == [Rung.REATTEMPT, Rung.DIAGNOSE, Rung.REATTEMPT, Rung.ROLLBACK, Rung.REPLAY]
    [cleared] = [one for one in report.versions if one.number == 2]
    assert (cleared.status, cleared.why) == ("replaced", "it was rolled back, and v1 failed in the same way")


def crashed(machine: str, step: int) -> Callable[[StopRanks], Evidence]:
    """Answer that the rank of a machine was killed at a step."""

    def evidence(given: StopRanks) -> Evidence:
        ends = [
            end.model_copy(update={"stopped_by_us": end.machine != machine, "time_ns": 1 + (end.machine != machine)})
            for end in exits(step)
        ]
        return Evidence(generation=given.generation, exits=ends, held=held(step))

    return evidence


async def test_an_unsolved_fault_climbs_the_ladder_at_any_machine_and_step(
    jobs: Jobs,
) -> None:
    handle = await struck(jobs)
    await recovered(jobs, handle, 2)
    jobs.cluster.evidence = crashed("m0", 130)
    await handle.execute_update(JobWorkflow.report, anomaly(2))
    report = await recovered(jobs, handle, 3)
    assert (report.failures[0].machine, report.failures[0].step) == ("m0", 130)
    assert tried(report) == [Rung.DIAGNOSE, Rung.REATTEMPT]
    state = await jobs.until(handle, lambda state: True)
    assert [one.generation for one in state.failures] == [1, 2] and all(one.over_ns for one in state.failures)
    assert [(one.generation, one.path) for one in state.tried] == [(1, "unclear"), (2, "unclear"), (2, "unclear")]


async def test_attempts_for_an_explained_failure_are_not_remembered(jobs: Jobs) -> None:
    """A machine came back empty. The attempts for this failure do not count for the next failure."""

    def emptied(given: StopRanks) -> Evidence:
        return crashed("m1", 20)(given).model_copy(update={"emptied": ["m1"]})

    jobs.cluster.evidence = emptied
    handle = await struck(jobs)
    report = await recovered(jobs, handle, 2)
    assert [one.path for one in report.tried] == ["explained"] and report.failures[0].explained
    state = await jobs.until(handle, lambda state: True)
    assert (state.tried, state.failures[0].explained) == ([], True)
    jobs.cluster.evidence = crashed("m1", 21)
    await handle.execute_update(JobWorkflow.report, anomaly(2))
    assert tried(await recovered(jobs, handle, 3)) == [Rung.REATTEMPT]


async def test_attempts_before_an_operators_resume_do_not_count_later(jobs: Jobs) -> None:
    jobs.cluster.confirmation = in_vain(2)
    handle = await struck(jobs, retry={"max_failures_at_step": 3}, ladder={"modes": {"replay": "off"}})
    state = await jobs.until(handle, lambda state: state.status == "parked")
    incident = jobs.client.get_workflow_handle(state.incidents[-1].id)
    shown = await incident.query(IncidentWorkflow.current_stage)
    assert "reattempt and diagnose did not help" in shown.found
    await incident.signal("resume", WHO)
    report = await recovered(jobs, handle, 4)
    assert tried(report) == [Rung.REATTEMPT, Rung.DIAGNOSE, Rung.REATTEMPT]
    state = await jobs.until(handle, lambda state: True)
    assert (state.tried, [one.generation for one in state.failures]) == ([], [3])
    await handle.execute_update(JobWorkflow.report, anomaly(4))
    assert tried(await recovered(jobs, handle, 5)) == [Rung.REATTEMPT]
