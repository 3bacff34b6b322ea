"""Faults of all kinds in simulated time. The ladder climbs only for a fault that is not solved."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.decisions.act.ladder.paths import PATHS
from everstep.decisions.act.recover.rules import Action
from everstep.model.incident import Symptom
from everstep.model.ladder import Rung
from everstep.model.recovery_policy import RecoveryPolicy
from everstep.model.version import VersionStatus
from tests.workflows.job_in_time import HOUR, STEP_S, JobInTime, S, Strike, tried

POLICY = RecoveryPolicy()
R, D, B, P = Rung.REATTEMPT, Rung.DIAGNOSE, Rung.ROLLBACK, Rung.REPLAY
DAY = 24 * HOUR
MINUTES = 300
"""A time without a failure that is too short for steady progress, seconds."""


def test_a_transient_fault_is_restarted_and_leaves_nothing_behind() -> None:
    job = JobInTime()
    job.strike(Strike(DAY, "m1"), Strike(10 * DAY, "m1"))
    assert job.rungs == [[R], [R]]
    assert job.state.failures[-1].over_ns > 0


@pytest.mark.parametrize("steps", [POLICY.progress.steady_steps - 10, POLICY.progress.steady_steps + 10])
def test_enough_steps_alone_are_no_steady_progress(steps: int) -> None:
    """A job with short steps completes a hundred of them in a short time."""
    job = JobInTime()
    job.strike(Strike(DAY, "m1"), Strike(600, "m1", step=int(job.step + DAY / STEP_S) + steps))
    assert job.rungs == [[R], [D, R]]
    assert len(job.state.failures) == 2


def test_the_time_of_tests_and_of_a_stop_is_no_progress() -> None:
    job = JobInTime(RecoveryPolicy(ladder={"window_h": 0.0}))
    job.strike(Strike(DAY, symptom=Symptom.NOT_FINITE))
    since_ns = job.state.failures[-1].over_ns
    assert since_ns > job.state.failures[-1].time_ns + 300 * S
    job.strike(Strike(HOUR - 200, symptom=Symptom.NOT_FINITE))
    assert len(job.state.failures) == 2, "an hour passed since the failure, but not since the job stepped again"
    job.strike(Strike(HOUR, symptom=Symptom.NOT_FINITE))
    assert len(job.state.failures) == 1


def test_a_fault_at_one_step_climbs_to_the_end_and_is_parked() -> None:
    job = JobInTime(versions=2, ran_s=MINUTES)
    at = job.step + 1000
    job.strike(*[Strike(MINUTES, "m1", step=at) for _ in range(20)])
    assert tried(job.rungs) == [R, D, R, B, P]
    assert job.parked.startswith("failed 4 times at step 2000 (SIGKILL)")
    assert "reattempt, diagnose, rollback and replay did not help, and nothing else is left to try" in job.parked


def test_what_comes_at_once_again_climbs_within_its_incident() -> None:
    job = JobInTime(versions=2, ran_s=MINUTES)
    job.strike(Strike(DAY, "m1", again=20))
    assert job.rungs == [[R, D, R, B, P]] and job.parked


def test_a_fault_that_wanders_climbs() -> None:
    """The job fails on another machine and at another step each time, before the earlier failure is solved."""
    job = JobInTime()
    job.strike(Strike(DAY, "m1", step=100), Strike(MINUTES, "m3", step=130), Strike(MINUTES / 3, "m2", step=140))
    assert job.rungs == [[R], [D, R], [P, R]]


def test_a_nan_that_wanders_climbs() -> None:
    job = JobInTime()
    job.strike(*[Strike(MINUTES, f"m{index}", Symptom.NOT_FINITE) for index in range(2)])
    assert job.rungs == [[D, R], [P, R]]


def test_another_symptom_is_another_fault() -> None:
    job = JobInTime()
    job.strike(Strike(DAY, "m1"), Strike(MINUTES, "m2", Symptom.HANG))
    assert job.rungs == [[R], [R]]


def test_many_failures_in_a_day_are_one_fault_whatever_machines_they_name() -> None:
    job = JobInTime()
    job.strike(*[Strike(3 * HOUR, f"m{index}") for index in range(4)])
    assert job.rungs == [[R], [R], [D, P, R], [R]]
    none = JobInTime(RecoveryPolicy(ladder={"repeats": 0}))
    none.strike(*[Strike(3 * HOUR, f"m{index}") for index in range(4)])
    assert none.rungs == [[R]] * 4


def test_what_comes_once_in_some_hours_on_one_machine_is_looked_for() -> None:
    job = JobInTime()
    job.strike(*[Strike(5 * HOUR, "m1") for _ in range(3)])
    assert job.rungs == [[R], [D, R], [P, R]]


def test_what_comes_once_in_two_days_begins_from_below_each_time() -> None:
    job = JobInTime()
    job.strike(*[Strike(2 * DAY, "m1", Symptom.NOT_FINITE) for _ in range(12)])
    assert job.rungs == [[D, R]] * 12 and not job.parked


@pytest.mark.parametrize("every_s", [POLICY.progress.steady_steps * STEP_S, HOUR / 2, 2 * HOUR])
def test_machines_that_fail_of_themselves_push_nobody_up_the_ladder(every_s: float) -> None:
    """A large job: inspections name another machine each time."""
    job = JobInTime(versions=2, ran_s=3 * DAY)
    job.strike(*[Strike(every_s, f"m{index % 4}", explained=True) for index in range(20)])
    assert job.rungs == [[R]] * 20 and not job.parked
    job.strike(Strike(every_s, "m2"))
    assert job.last == [R], "attempts for known causes do not count for an unknown cause"
    assert job.version(2).status is VersionStatus.RUNNING


def test_a_machine_that_fails_in_between_does_not_make_a_fault_look_solved_nor_unsolved() -> None:
    job = JobInTime(RecoveryPolicy(ladder={"window_h": 0.0}))
    job.strike(Strike(DAY, "m1"), Strike(1200, "m3", explained=True), Strike(1200, "m2"))
    assert job.rungs == [[R], [R], [D, R]]
    job = JobInTime(RecoveryPolicy(ladder={"window_h": 0.0}))
    job.strike(Strike(DAY, "m1"), Strike(2000, "m3", explained=True), Strike(2000, "m2"))
    assert job.rungs == [[R], [R], [R]]


@pytest.mark.parametrize("rung", [D, P])
def test_a_fault_whose_machine_was_found_is_over_and_the_next_one_begins_below(rung: Rung) -> None:
    """Another machine breaks in the same way. The tests, which cost less than a replay, come first again."""
    job = JobInTime()
    nan = Strike(MINUTES, symptom=Symptom.NOT_FINITE)
    job.strike(*([nan] if rung is P else []), replace(nan, finds=rung))
    assert job.last == [rung, R] and job.state.tried == []
    job.strike(nan)
    assert job.last == [D, R]


def test_what_was_tried_counts_on_where_the_machine_left_for_another_reason() -> None:
    """The tests passed, and later an inspection found a lost GPU, which does not explain the fault of the tests."""
    job = JobInTime()
    nan = Strike(MINUTES, symptom=Symptom.NOT_FINITE)
    job.strike(nan, replace(nan, finds=P, leaves_by="gpu-lost"))
    assert [one.rung for one in job.state.tried] != []
    job.strike(nan)
    assert job.last != [D, R]


def test_a_machine_that_inspections_name_does_not_make_another_fault_forgotten() -> None:
    job = JobInTime()
    job.strike(Strike(DAY, "m1"), Strike(MINUTES, "m2", explained=True), Strike(MINUTES, "m3"))
    assert job.rungs == [[R], [R], [D, R]]


def test_code_that_ran_well_for_days_is_not_taken_back_for_what_wanders() -> None:
    job = JobInTime(versions=2, ran_s=3 * DAY)
    job.strike(*[Strike(MINUTES, f"m{index}") for index in range(4)])
    assert B not in tried(job.rungs) and P in tried(job.rungs)
    skipped = [text for plan in job.plans if plan.rung for text in plan.rung.skipped]
    assert "rollback: v2 ran well for 72 h, and it fails at another step each time" in skipped
    here = JobInTime(versions=2, ran_s=3 * DAY)
    here.strike(*[Strike(MINUTES, f"m{index}", step=2000) for index in range(3)])
    assert B in tried(here.rungs), "if the job always fails at one step, the code may be the cause"


def test_code_that_is_taken_back_stays_suspect_where_that_has_solved_it() -> None:
    job = JobInTime(versions=2, ran_s=MINUTES)
    job.strike(*[Strike(MINUTES, "m1", step=2000) for _ in range(3)])
    assert (job.last, job.version(2).status) == ([B], VersionStatus.SUSPECT)
    assert job.version(1).status is not VersionStatus.SUSPECT
    solved = Strike(20 * HOUR, "m1")
    job.strike(solved)
    assert job.version(2).status is VersionStatus.SUSPECT, "without v2 the job ran for 20 hours"


def test_code_that_is_taken_back_is_cleared_where_the_job_fails_before_steady_progress() -> None:
    job = JobInTime(versions=2, ran_s=MINUTES)
    job.strike(*[Strike(MINUTES, "m1", step=2000) for _ in range(3)], Strike(HOUR / 2, "m2"))
    assert job.version(2).status is VersionStatus.REPLACED
    assert job.version(2).why == "it was rolled back, and v1 failed in the same way"


def test_a_version_is_steady_once_it_ran_for_long_enough_and_far_enough() -> None:
    soon = JobInTime(ran_s=0.0)
    soon.strike(Strike(HOUR / 2, "m1"))
    assert (soon.version(1).proven, soon.version(1).steady) == (True, False)
    soon.strike(Strike(HOUR / 2 + 60, "m1"))
    assert not soon.version(1).steady, "the job failed before v1 was steady"
    soon.strike(Strike(HOUR, "m1"))
    assert soon.version(1).steady


def test_a_fault_that_nothing_solves_is_parked_with_what_was_tried_and_begins_afresh_when_it_is_resumed() -> None:
    job = JobInTime()
    job.strike(*[Strike(2 * HOUR, symptom=Symptom.NOT_FINITE) for _ in range(100)])
    assert job.rungs == [[D, R], [P, R], *[[R]] * (POLICY.ladder.restarts - 1), []]
    assert "the fault returned after 5 restarts" in job.parked
    assert "reattempt, diagnose and replay did not help" in job.parked
    assert "rollback: there is no version to go back to" in job.parked
    job.resume()
    job.strike(Strike(MINUTES, symptom=Symptom.NOT_FINITE))
    assert job.last == [D, R] and not job.parked
    assert len(job.state.failures) == 2, "only the last failure before the resume and the new failure are kept"


def test_a_machine_that_is_gone_parks_no_job_for_what_was_restarted_before_it() -> None:
    """The rungs and restarts were used up for crashes without a known cause, which are another fault."""
    job = JobInTime()
    job.strike(*[Strike(2 * HOUR, "m1") for _ in range(7)])
    assert job.plans[-1].rung and job.plans[-1].rung.restarts == POLICY.ladder.restarts - 1
    job.strike(Strike(2 * HOUR, "m2", explained=True))
    assert job.last == [R] and not job.parked
    assert job.plans[-1].rung and not job.plans[-1].rung.last
    job.strike(Strike(HOUR, "m1"))
    assert "the fault returned after 5 restarts" in job.parked, "the restarts of the other fault are remembered"


def test_a_job_that_fails_seldom_is_not_parked_for_it() -> None:
    job = JobInTime()
    job.strike(*[Strike(9 * HOUR, symptom=Symptom.NOT_FINITE) for _ in range(50)])
    assert not job.parked


# The laws below are true for any strikes.

SYMPTOMS = (Symptom.CRASH, Symptom.NOT_FINITE, Symptom.HANG)
STRIKES = st.builds(
    Strike,
    st.sampled_from([20.0, 600.0, 1800.0, 4000.0, 20_000.0, 100_000.0]),
    st.sampled_from(["", "m0", "m1", "m2"]),
    st.sampled_from(SYMPTOMS),
    st.booleans(),
    again=st.sampled_from([0, 0, 0, 1, 3]),
)
LIVES = st.lists(STRIKES, min_size=1, max_size=25)


@given(LIVES, st.sampled_from([1, 2]), st.sampled_from([0.0, MINUTES, 3.0 * DAY]))
@settings(max_examples=200)
def test_no_rung_is_left_out_that_could_be_tried(strikes: list[Strike], versions: int, ran_s: float) -> None:
    job = JobInTime(versions=versions, ran_s=ran_s)
    job.strike(*strikes)
    for plan, known in zip(job.plans, job.known, strict=True):
        step = plan.rung
        assert step is not None
        path = next(path for path in PATHS if path.name == step.path)
        left_out = {text.split(":")[0] for text in step.skipped}
        assert step.last or path.rungs[step.position] is step.rung
        assert all(rung in known or rung in left_out for rung in path.rungs[: step.position])


@given(LIVES, st.sampled_from([1, 2]))
@settings(max_examples=200)
def test_a_fault_that_is_not_solved_is_never_met_lower_than_before(strikes: list[Strike], versions: int) -> None:
    """All failures have one symptom and follow too soon to be solved, so no rung but the reattempt is tried twice."""
    job = JobInTime(versions=versions, ran_s=MINUTES)
    soon = [Strike(min(one.after_s, 1800.0), one.machine, again=one.again) for one in strikes]
    job.strike(*soon)
    met = tried(job.rungs)
    assert all(met.count(rung) <= 1 for rung in (D, B, P))
    assert [rung for rung in met if rung is not R] == [rung for rung in (D, B, P) if rung in met]
    assert len(soon) < POLICY.retry.max_failures_without_progress or job.parked


@given(LIVES)
@settings(max_examples=200)
def test_every_fault_is_solved_or_parked(strikes: list[Strike]) -> None:
    """For failures of unknown cause, the launches in any window are limited by the number of rungs and the policy."""
    job = JobInTime()
    job.strike(*[Strike(one.after_s, one.machine, one.symptom, again=one.again) for one in strikes])
    most = max(len(path.rungs) for path in PATHS) + POLICY.ladder.repeats + POLICY.ladder.restarts
    window_ns = POLICY.ladder.window_h * HOUR * S
    for began_ns in job.launches_ns:
        within = [one for one in job.launches_ns if began_ns <= one < began_ns + window_ns]
        assert len(within) <= most * len(SYMPTOMS)


@given(LIVES)
@settings(max_examples=100)
def test_what_inspections_explain_climbs_nowhere(strikes: list[Strike]) -> None:
    job = JobInTime(versions=2, ran_s=3.0 * DAY)
    job.strike(*[Strike(one.after_s + 1000, one.machine, one.symptom, explained=True) for one in strikes])
    assert set(tried(job.rungs)) <= {R} and not job.parked


def test_the_model_parks_and_restarts_for_the_reasons_of_the_product() -> None:
    """This test shows that the laws above do not hold only because the model does nothing."""
    job = JobInTime(versions=2, ran_s=MINUTES)
    job.strike(Strike(DAY, "m1", again=20))
    assert {plan.action for plan in job.plans} == {Action.REATTEMPT, Action.DIAGNOSE, Action.REPLAY, Action.PARK}
