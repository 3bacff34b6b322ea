"""Reattempt or park."""

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
from everstep.model.state_copy import StateCopy, Tier
from tests.rank_ends import exited

POLICY = RecoveryPolicy()


HOUR = int(POLICY.progress.steady_s * 1e9)


def failure(step: int, cause: str = "SIGKILL", time_ns: int = 0, shown: int = -1, **more: Any) -> Failure:
    return Failure(generation=1, step=step, symptom=Symptom.CRASH, cause=cause, time_ns=time_ns, shown=shown, **more)


def facts(**fields: object) -> RestartFacts:
    given = {
        "failure": failure(20),
        "history": (),
        "attempts": 0,
        "evidence": Evidence(generation=1),
        "restore_step": 20,
        "world_size": 2,
    }
    return RestartFacts(**(given | fields))  # type: ignore[arg-type]


def test_a_first_crash_is_reattempted_at_once() -> None:
    decision = decide(facts(), POLICY)

    assert (decision.action, decision.rule, decision.delay_s) == (Action.REATTEMPT, "try-again", 0.0)


def test_a_silent_machine_parks_the_job_and_is_named() -> None:
    decision = decide(facts(evidence=Evidence(generation=1, unreachable=["m3"])), POLICY)

    assert (decision.action, decision.rule, decision.awaited) == (Action.PARK, "machine-silent", ("m3",))


def raised(rank: int, exception: str) -> RankExit:
    return exited(rank=rank, machine="m0", code=1, exception=exception)


def test_a_script_that_fails_at_import_on_every_rank_is_not_tried_again() -> None:
    ends = [
        raised(0, "ModuleNotFoundError: No module named 'modle'"),
        raised(1, "ModuleNotFoundError: No module named 'modle'"),
    ]
    decision = decide(facts(failure=failure(-1), evidence=Evidence(generation=1, exits=ends)), POLICY)

    assert decision.rule == "broken-from-the-start"
    assert "No module named 'modle'" in decision.text


def test_a_state_that_fits_no_rank_is_not_tried_again_though_each_says_so_in_its_own_words() -> None:
    ends = [
        raised(0, "everstep.errors.CheckpointError: the saved state of 'model' lacks blocks.0"),
        raised(1, "everstep.errors.CheckpointError: the saved state of 'model' lacks blocks.1"),
    ]
    unfit = facts(failure=failure(20), resume_step=20, evidence=Evidence(generation=1, exits=ends))

    assert decide(unfit, POLICY).rule == "broken-from-the-start"


def test_damage_and_lost_connections_in_many_words_are_tried_again() -> None:
    for kind in ("everstep.errors.CorruptCheckpoint", "RuntimeError"):
        ends = [raised(0, f"{kind}: from 0"), raised(1, f"{kind}: from 1")]
        failed = facts(failure=failure(20), resume_step=20, evidence=Evidence(generation=1, exits=ends))
        assert decide(failed, POLICY).rule == "try-again"


def test_an_exception_on_one_rank_alone_is_reattempted() -> None:
    ends = [raised(0, "ValueError: once"), RankExit(rank=1, machine="m0", signal=9, stopped_by_us=True)]
    decision = decide(facts(failure=failure(0), evidence=Evidence(generation=1, exits=ends)), POLICY)

    assert decision.rule == "try-again"


def test_the_same_step_again_and_again_parks() -> None:
    history = (failure(20), failure(20))

    assert decide(facts(history=history[:1]), POLICY).rule == "try-again"
    assert decide(facts(history=history), POLICY).rule == "same-step-again"


def test_failures_at_different_steps_park_only_without_progress() -> None:
    history = tuple(failure(step) for step in (1, 2, 3, 4))

    assert decide(facts(history=history[:3]), POLICY).rule == "try-again"
    assert decide(facts(history=history), POLICY).rule == "no-progress"


def test_losing_too_many_steps_needs_an_operator() -> None:
    far = facts(failure=failure(5000), restore_step=0)

    assert decide(far, POLICY).rule == "too-much-to-lose"
    assert decide(facts(failure=failure(5000), restore_step=4999), POLICY).rule == "try-again"


@given(st.integers(0, 10_000))
def test_the_wait_grows_and_is_bounded(failures_before: int) -> None:
    wait = backoff_s(failures_before, POLICY)

    assert 0 <= wait <= POLICY.retry.backoff_max_s
    assert backoff_s(failures_before + 1, POLICY) >= wait


@given(st.lists(st.integers(-1, 300), max_size=60))
def test_no_sequence_of_failures_is_reattempted_for_ever(steps: list[int]) -> None:
    """However a job fails, it parks before its failures in a row exceed the limit."""
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
    assert still_counting(own, failure(-1, shown=99, time_ns=HOUR + 2), POLICY) == own, "it counts its steps by itself"
    assert still_counting(own, failure(-1, shown=100, time_ns=HOUR + 2), POLICY) == []


def test_its_time_begins_when_the_job_steps_again() -> None:
    old = [failure(20, time_ns=1, over_ns=HOUR)]

    assert still_counting(old, failure(200, time_ns=2 * HOUR - 1), POLICY) == old
    assert still_counting(old, failure(200, time_ns=2 * HOUR), POLICY) == []


def test_failures_of_machines_are_forgotten_sooner_and_do_not_interrupt() -> None:
    unclear = failure(20, time_ns=1)
    gone = failure(100, "machine lost", time_ns=HOUR // 2, explained=True)

    assert still_counting([unclear, gone], failure(110, time_ns=HOUR - 1), POLICY) == [unclear, gone]
    assert still_counting([unclear, gone], failure(200, time_ns=HOUR - 1), POLICY) == [unclear]
    assert still_counting([unclear, gone], failure(121, time_ns=HOUR + 2), POLICY) == [gone]
    assert still_counting([gone, unclear], failure(119, time_ns=HOUR + 2), POLICY) == [unclear]


def test_a_fault_that_comes_again_at_the_same_place_is_the_same_whatever_lies_between() -> None:
    """A checkpoint far back: hours pass, and other faults, until the same bad batch is met again."""
    bad = failure(5000, "ValueError", time_ns=1)
    between = failure(4050, "SIGKILL", time_ns=HOUR)
    again = failure(5000, "ValueError", time_ns=9 * HOUR)

    kept = still_counting([bad, between], again, POLICY)
    assert kept == [bad]
    assert decide(facts(failure=again, history=(bad, *kept)), POLICY).rule == "same-step-again"
    other = failure(5000, "SIGKILL", time_ns=9 * HOUR)
    assert still_counting([bad, between], other, POLICY) == [bad], "the job did not get past it"
    beyond = failure(5400, time_ns=HOUR + 2)
    assert still_counting([bad], beyond, POLICY) == [], "the job had got over it"
    assert still_counting([beyond], again, POLICY) == [beyond], "and did not come there any more"


def test_a_script_without_steps_of_ours_has_places_too() -> None:
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


def test_where_only_time_can_tell_it_does() -> None:
    old = [failure(-1, "SIGKILL", time_ns=1, shown=0)]

    assert still_counting(old, failure(-1, "SIGKILL", time_ns=HOUR, shown=0), POLICY) == old
    assert still_counting(old, failure(-1, "SIGKILL", time_ns=HOUR + 1, shown=0), POLICY) == []


def test_what_every_rank_raises_after_steps_of_its_own_was_not_there_from_the_start() -> None:
    ends = [raised(rank, "RuntimeError: NCCL error") for rank in (0, 1)]
    evidence = Evidence(generation=1, exits=ends)

    for shown, rule in ((0, "broken-from-the-start"), (-1, "broken-from-the-start"), (5000, "try-again")):
        found = decide(facts(failure=failure(-1, shown=shown), evidence=evidence, restore_step=-1), POLICY)
        assert found.rule == rule, shown


def test_an_old_state_parks_as_none_at_all_does_when_it_costs_too_many_steps() -> None:
    policy = RecoveryPolicy(retry={"max_lost_steps": 100})
    old = facts(failure=failure(500), restore_step=399, restore_reason="step 399 is on disk")

    decision = decide(old, policy)

    assert decision.rule == "too-much-to-lose"
    assert decision.text == "a restart from step 399 would lose 101 steps (step 399 is on disk)"
    assert decide(facts(failure=failure(500), restore_step=400), policy).rule == "try-again"


def test_a_script_that_restores_by_itself_loses_what_nobody_knows() -> None:
    assert decide(facts(failure=failure(5000), restore_step=-1), POLICY).rule == "try-again"


def test_a_job_does_not_begin_anew_while_copies_are_there_that_could_not_be_brought() -> None:
    stuck = StateCopy(rank=4, machine="m1", completed_steps=19, tier=Tier.BACKUP, valid=False, reason="no room on m2")

    decision = decide(facts(restore_step=0, unreached=(stuck,)), POLICY)

    assert decision.rule == "copies-out-of-reach"
    assert "of rank 4 at step 19 the backup on m1: no room on m2" in decision.text
    assert decide(facts(restore_step=18, unreached=(stuck,)), POLICY).rule == "try-again"


def test_what_an_operators_resume_does_not_overrule() -> None:
    """A restart is impossible then, or loses what was not given up."""
    binding = {rule.name for rule in RULES if rule.binds_operator}
    assert binding == {"search-for-newer", "machine-silent", "newer-may-exist", "copies-out-of-reach", "resumed"}


def test_the_rules_that_count_failures_are_of_the_code_and_no_rule_is_named_twice() -> None:
    assert all(rule.of_the_code for rule in RULES if rule.counts_failures)
    assert len({rule.name for rule in RULES}) == len(RULES)


@pytest.mark.parametrize("many", [{"attempts": 99}, {"history": (failure(20),) * 9}])
def test_limits_do_not_hold_up_other_code_nor_the_launch_without_the_machine_at_fault(many: dict[str, object]) -> None:
    assert decide(facts(**many), POLICY).action is Action.PARK
    change = VersionChange(2, "update to v2 by ada")
    verdict = decide(facts(**many, change=change), POLICY)
    assert (verdict.rule, verdict.text, verdict.delay_s) == ("other-code", change.why, 0.0)
    assert decide(facts(**many, one_left=True), POLICY).rule == "try-again"
    assert decide(facts(**many, by_operator=True, change=change), POLICY).rule == "resumed"


def test_a_job_that_was_stopped_for_an_update_goes_on_at_once_where_that_is_withdrawn() -> None:
    stopped = failure(20).model_copy(update={"symptom": Symptom.UPDATE})
    verdict = decide(facts(failure=stopped, history=(failure(3),)), POLICY)
    assert (verdict.action, verdict.rule, verdict.delay_s) == (Action.REATTEMPT, "update-withdrawn", 0.0)


anything = st.builds(
    facts,
    failure=st.builds(failure, st.integers(-1, 5000), shown=st.integers(-1, 9)),
    attempts=st.integers(0, 9),
    failed_restores=st.integers(0, 9),
    restore_step=st.integers(-1, 5000),
    needs_operator=st.sampled_from(["", "somebody closed it"]),
    waits=st.sampled_from(["", "m1 leaves once there is another"]),
    readable_until=st.sampled_from([None, 7]),
    sound_until=st.sampled_from([None, 7]),
    evidence=st.sampled_from([Evidence(generation=1), Evidence(generation=1, unreachable=["m1"])]),
    one_left=st.booleans(),
    by_operator=st.booleans(),
)


@given(anything)
def test_every_verdict_names_its_rule_and_only_silence_is_awaited(known: RestartFacts) -> None:
    verdict = decide(known, POLICY)
    rule = next(rule for rule in RULES if rule.name == verdict.rule)
    assert rule.applies(known) and verdict.text
    assert (not verdict.awaited) or verdict.rule in {"machine-silent", "eviction-waits"}
    if known.by_operator:
        assert verdict.rule in {"machine-silent", "resumed"}
