"""The rules of restarts: whether a stopped job is reattempted or parked."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.decisions.act.progress import still_counting
from everstep.decisions.act.recover.rules import RULES, Action, RestartFacts, backoff_s, decide
from everstep.decisions.act.versions.next_version import VersionChange
from everstep.model.evidence import Evidence, RankExit
from everstep.model.incident import Failure, Symptom
from everstep.model.recovery_policy import RecoveryPolicy
from everstep.model.state_copy import StateCopies, Tier
from tests.rank_ends import exited

POLICY = RecoveryPolicy()
HOUR = int(POLICY.progress.steady_s * 1e9)


def failure(step: int, cause: str = "SIGKILL", time_ns: int = 0, shown: int = -1, **more: Any) -> Failure:
    return Failure(generation=1, step=step, symptom=Symptom.CRASH, cause=cause, time_ns=time_ns, shown=shown, **more)


def facts(**fields: object) -> RestartFacts:
    usual = {
        "failure": failure(20),
        "history": (),
        "attempts": 0,
        "evidence": Evidence(generation=1),
        "restore_step": 20,
        "world_size": 2,
    }
    return RestartFacts(**(usual | fields))  # type: ignore[arg-type]


def test_a_first_crash_is_reattempted_at_once() -> None:
    decision = decide(facts(), POLICY)

    assert (decision.action, decision.rule, decision.delay_s) == (Action.REATTEMPT, "try-again", 0.0)


def test_a_silent_machine_parks_the_job_and_is_named() -> None:
    decision = decide(facts(evidence=Evidence(generation=1, unreachable=["m3"])), POLICY)

    assert (decision.action, decision.rule, decision.awaited) == (Action.PARK, "machine-silent", ("m3",))


def raised(rank: int, exception: str) -> RankExit:
    return exited(rank=rank, machine="m0", code=1, exception=exception)


@pytest.mark.parametrize(
    ("exceptions", "rule"),
    [
        (["ModuleNotFoundError: No module named 'modle'"] * 2, "broken-from-the-start"),
        ([f"everstep.errors.CheckpointError: 'model' lacks blocks.{rank}" for rank in (0, 1)], "broken-from-the-start"),
        ([f"everstep.errors.CorruptCheckpoint: from {rank}" for rank in (0, 1)], "try-again"),
        ([f"RuntimeError: from {rank}" for rank in (0, 1)], "try-again"),
        (["ValueError: once"], "try-again"),
    ],
)
def test_a_script_is_broken_from_the_start_if_every_rank_raises_the_same(exceptions: list[str], rule: str) -> None:
    ends = [raised(rank, exception) for rank, exception in enumerate(exceptions)]
    failed = facts(failure=failure(20), resume_step=20, evidence=Evidence(generation=1, exits=ends))
    assert decide(failed, POLICY).rule == rule


def test_too_many_failures_at_one_step_park_the_job() -> None:
    history = (failure(20), failure(20))

    assert decide(facts(history=history[:1]), POLICY).rule == "try-again"
    assert decide(facts(history=history), POLICY).rule == "same-step-again"


def test_failures_at_different_steps_park_only_without_progress() -> None:
    history = tuple(failure(step) for step in (1, 2, 3, 4))

    assert decide(facts(history=history[:3]), POLICY).rule == "try-again"
    assert decide(facts(history=history), POLICY).rule == "no-progress"


@pytest.mark.parametrize(
    ("failed", "restore", "rule"),
    [
        (101, 0, "too-much-to-lose"),
        (500, 399, "too-much-to-lose"),
        (500, 400, "try-again"),
        (5000, -1, "try-again"),  # the script restores by itself
    ],
)
def test_a_restart_that_loses_too_many_steps_needs_an_operator(failed: int, restore: int, rule: str) -> None:
    policy = RecoveryPolicy(retry={"max_lost_steps": 100})
    assert decide(facts(failure=failure(failed), restore_step=restore), policy).rule == rule


def test_by_default_a_restart_may_lose_a_thousand_steps() -> None:
    assert decide(facts(failure=failure(1000), restore_step=0), POLICY).rule == "try-again"
    assert decide(facts(failure=failure(1001), restore_step=0), POLICY).rule == "too-much-to-lose"


@given(st.integers(0, 10_000))
def test_the_wait_grows_and_is_bounded(failures_before: int) -> None:
    wait = backoff_s(failures_before, POLICY)

    assert 0 <= wait <= POLICY.retry.backoff_max_s
    assert backoff_s(failures_before + 1, POLICY) >= wait


@given(st.lists(st.integers(-1, 300), max_size=60))
def test_no_sequence_of_failures_is_reattempted_forever(steps: list[int]) -> None:
    """A job is parked before the number of its failures in a row exceeds the limit."""
    history: list[Failure] = []
    in_a_row = 0
    for step in steps:
        now = failure(step)
        history = still_counting(history, now, POLICY)
        in_a_row = len(history)
        if decide(facts(failure=now, history=tuple(history)), POLICY).action == "park":
            history = []
        else:
            history.append(now)
    assert in_a_row < POLICY.retry.max_failures_without_progress


def test_only_steady_progress_solves_a_failure_both_in_steps_and_in_time() -> None:
    old = [failure(20, time_ns=1)]

    assert still_counting(old, failure(119, time_ns=HOUR + 2), POLICY) == old
    assert still_counting(old, failure(120, time_ns=2), POLICY) == old
    assert still_counting(old, failure(21, time_ns=9 * HOUR), POLICY) == old
    assert still_counting(old, failure(120, time_ns=HOUR + 2), POLICY) == []
    assert still_counting([failure(-1, time_ns=1)], failure(-1, time_ns=HOUR + 2), POLICY) == []
    own = [failure(-1, shown=3, time_ns=1)]
    assert still_counting(own, failure(-1, shown=99, time_ns=HOUR + 2), POLICY) == own, (
        "without numbered steps, the steps that the process showed count, and they are too few"
    )
    assert still_counting(own, failure(-1, shown=100, time_ns=HOUR + 2), POLICY) == []


def test_the_time_of_steady_progress_begins_when_the_job_steps_again() -> None:
    old = [failure(20, time_ns=1, over_ns=HOUR)]

    assert still_counting(old, failure(200, time_ns=2 * HOUR - 1), POLICY) == old
    assert still_counting(old, failure(200, time_ns=2 * HOUR), POLICY) == []


def test_failures_of_machines_are_solved_sooner_and_do_not_interrupt_progress() -> None:
    unclear = failure(20, time_ns=1)
    gone = failure(100, "machine lost", time_ns=HOUR // 2, explained=True)

    assert still_counting([unclear, gone], failure(110, time_ns=HOUR - 1), POLICY) == [unclear, gone]
    assert still_counting([unclear, gone], failure(200, time_ns=HOUR - 1), POLICY) == [unclear]
    assert still_counting([unclear, gone], failure(121, time_ns=HOUR + 2), POLICY) == [gone]
    assert still_counting([gone, unclear], failure(119, time_ns=HOUR + 2), POLICY) == [unclear]


def test_a_fault_that_returns_at_the_same_position_was_not_solved() -> None:
    """The job resumed from an old checkpoint. After hours and other faults, it reaches the same bad batch again."""
    bad = failure(5000, "ValueError", time_ns=1)
    between = failure(4050, "SIGKILL", time_ns=HOUR)
    again = failure(5000, "ValueError", time_ns=9 * HOUR)

    kept = still_counting([bad, between], again, POLICY)
    assert kept == [bad]
    assert decide(facts(failure=again, history=(bad, *kept)), POLICY).rule == "same-step-again"
    other = failure(5000, "SIGKILL", time_ns=9 * HOUR)
    assert still_counting([bad, between], other, POLICY) == [bad], (
        "the job failed at step 5000 again, so it did not pass it"
    )
    beyond = failure(5400, time_ns=HOUR + 2)
    assert still_counting([bad], beyond, POLICY) == [], "the job passed step 5000, so the failure there is solved"
    assert still_counting([beyond], again, POLICY) == [beyond], (
        "the job did not reach step 5400 again, so the failure there is not solved"
    )


def test_a_script_without_numbered_steps_has_positions_too() -> None:
    start = [failure(-1, "ImportError", shown=0) for _ in range(3)]
    assert decide(facts(failure=start[0], history=(start[0],)), POLICY).rule == "try-again"
    parked = decide(facts(failure=start[2], history=tuple(start[:2])), POLICY)
    assert (parked.rule, parked.text) == ("same-step-again", "failed 3 times before any step was shown (ImportError)")

    later = [failure(-1, "ValueError", time_ns=nth * 2 * HOUR, shown=40) for nth in range(3)]
    assert still_counting(later[:2], later[2], POLICY) == later[:2]
    parked = decide(facts(failure=later[2], history=tuple(later[:2])), POLICY)
    assert parked.text == "failed 3 times after 40 steps of its process (ValueError)"
    elsewhere = failure(-1, "ValueError", shown=41)
    assert decide(facts(failure=elsewhere, history=tuple(later[:2])), POLICY).rule == "try-again"
    unknown = failure(-1, "SIGKILL")
    assert decide(facts(failure=unknown, history=(unknown,) * 3), POLICY).rule == "try-again"


def test_without_steps_only_the_time_counts() -> None:
    old = [failure(-1, "SIGKILL", time_ns=1, shown=0)]

    assert still_counting(old, failure(-1, "SIGKILL", time_ns=HOUR, shown=0), POLICY) == old
    assert still_counting(old, failure(-1, "SIGKILL", time_ns=HOUR + 1, shown=0), POLICY) == []


def test_an_exception_of_every_rank_after_its_first_steps_is_tried_again() -> None:
    ends = [raised(rank, "RuntimeError: NCCL error") for rank in (0, 1)]
    evidence = Evidence(generation=1, exits=ends)

    for shown, rule in ((0, "broken-from-the-start"), (-1, "broken-from-the-start"), (5000, "try-again")):
        found = decide(facts(failure=failure(-1, shown=shown), evidence=evidence, restore_step=-1), POLICY)
        assert found.rule == rule, shown


def test_a_job_does_not_begin_from_nothing_while_copies_are_out_of_reach() -> None:
    stuck = StateCopies.one(
        rank=4, machine="m1", completed_steps=19, tier=Tier.BACKUP, valid=False, reason="no room on m2"
    )

    decision = decide(facts(restore_step=0, unreached=(stuck,)), POLICY)

    assert decision.rule == "copies-out-of-reach"
    assert "the backup of rank 4 at step 19 on m1: no room on m2" in decision.text
    assert decide(facts(restore_step=18, unreached=(stuck,)), POLICY).rule == "try-again"


def test_the_rules_that_an_operators_resume_does_not_overrule() -> None:
    binding = {rule.name for rule in RULES if rule.binds_operator}
    assert binding == {"search-for-newer", "machine-silent", "newer-may-exist", "copies-out-of-reach", "resumed"}


def test_rules_that_count_failures_are_about_code_and_names_are_unique() -> None:
    assert all(rule.of_the_code for rule in RULES if rule.counts_failures)
    assert len({rule.name for rule in RULES}) == len(RULES)


@pytest.mark.parametrize("many", [{"attempts": 99}, {"history": (failure(20),) * 9}])
def test_limits_prevent_neither_other_code_nor_the_launch_without_the_failed_machine(many: dict[str, object]) -> None:
    assert decide(facts(**many), POLICY).action is Action.PARK
    change = VersionChange(2, "update to v2 by ada")
    verdict = decide(facts(**many, change=change), POLICY)
    assert (verdict.rule, verdict.text, verdict.delay_s) == ("other-code", change.why, 0.0)
    assert decide(facts(**many, failed_machine_left=True), POLICY).rule == "try-again"
    assert decide(facts(**many, by_operator=True, change=change), POLICY).rule == "resumed"


def test_a_job_that_was_stopped_for_an_update_continues_at_once_if_the_update_is_withdrawn() -> None:
    stopped = failure(20).model_copy(update={"symptom": Symptom.UPDATE})
    verdict = decide(facts(failure=stopped, history=(failure(3),)), POLICY)
    assert (verdict.action, verdict.rule, verdict.delay_s) == (Action.REATTEMPT, "update-withdrawn", 0.0)


anything = st.builds(
    facts,
    failure=st.builds(failure, st.integers(-1, 5000), shown=st.integers(-1, 9)),
    attempts=st.integers(0, 9),
    failed_restores=st.integers(0, 9),
    restore_step=st.integers(-1, 5000),
    needs_operator=st.sampled_from(["", "it was closed from outside"]),
    waits=st.sampled_from(["", "m1 leaves once there is another"]),
    readable_until=st.sampled_from([None, 7]),
    sound_until=st.sampled_from([None, 7]),
    evidence=st.sampled_from([Evidence(generation=1), Evidence(generation=1, unreachable=["m1"])]),
    failed_machine_left=st.booleans(),
    by_operator=st.booleans(),
)


@given(anything)
def test_every_verdict_has_a_rule_and_only_silent_machines_are_awaited(known: RestartFacts) -> None:
    verdict = decide(known, POLICY)
    rule = next(rule for rule in RULES if rule.name == verdict.rule)
    assert rule.applies(known) and verdict.text
    assert (not verdict.awaited) or verdict.rule in {"machine-silent", "eviction-waits"}
    if known.by_operator:
        assert verdict.rule in {"machine-silent", "resumed"}


STALE = "OSError: [Errno 116] Stale file handle: '/mnt/nfs/data.bin'"


def service_fails(minutes: float, before: tuple[float, ...] = (), **more: object) -> RestartFacts:
    """Storage fails at minute ``minutes``. It also failed at the minutes ``before``."""

    def at(minute: float) -> Failure:
        return failure(20, time_ns=int((1000 + minute) * 60e9), classification=raised(0, STALE).classification)

    earlier = tuple(map(at, before))
    return facts(failure=at(minutes), history=earlier, attempts=len(before), service="remote storage", **more)


def test_a_job_waits_for_a_service_for_an_hour_with_growing_pauses() -> None:
    first, later = decide(service_fails(0), POLICY), decide(service_fails(50, (0, 1, 3, 8, 20)), POLICY)
    assert (first.action, first.rule, first.delay_s) == (Action.REATTEMPT, "service-failed", 0.0)
    assert (later.action, later.rule) == (Action.REATTEMPT, "service-failed")
    assert 1 < later.delay_s <= POLICY.retry.backoff_max_s
    parked = decide(service_fails(61, (0, 1, 3, 8, 20)), POLICY)
    assert (parked.action, parked.rule) == (Action.PARK, "service-failed")


def test_an_outage_of_a_service_begins_after_the_last_other_failure() -> None:
    known = service_fails(61, (50, 55))
    other = failure(20, time_ns=int(900 * 60e9))
    assert decide(RestartFacts(**{**_fields(known), "history": (other, *known.history)}), POLICY).action is (
        Action.REATTEMPT
    )


def _fields(known: RestartFacts) -> dict[str, Any]:
    return {name: getattr(known, name) for name in RestartFacts.__slots__}


def test_a_job_that_trains_well_is_not_parked_for_its_number_of_failures() -> None:
    history = tuple(failure(20 + number, cause=f"cause {number}") for number in range(9))
    assert decide(facts(history=history), POLICY).rule == "no-progress"
    assert decide(facts(history=history, trains_well=True), POLICY).rule == "try-again"


def test_a_job_is_not_launched_beside_dying_ranks() -> None:
    dying = Evidence(generation=1, dying={"m1": "rank 3 (pid 4711, state D) has been dying for 40 s"})
    assert decide(facts(evidence=dying), POLICY).rule == "machine-silent"
