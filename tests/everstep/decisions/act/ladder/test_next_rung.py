"""The ladder: the order of its rungs for each kind of failure, and which earlier attempts count."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.decisions.act.ladder.next_rung import counted, kept, mode_of, next_rung
from everstep.decisions.act.ladder.paths import PATHS, LadderFacts, path_of
from everstep.model.evidence import Classification
from everstep.model.finding import Owner
from everstep.model.incident import Failure, Symptom
from everstep.model.ladder import Rung, RungMode, TriedRung
from everstep.model.recovery_policy import RecoveryPolicy

HOUR_NS = 3600 * 10**9
NOW_NS = 100 * HOUR_NS
POLICY = RecoveryPolicy()
R, D, B, P = Rung.REATTEMPT, Rung.DIAGNOSE, Rung.ROLLBACK, Rung.REPLAY


def failure(symptom: Symptom = Symptom.CRASH, owner: str = "", **fields: Any) -> Failure:
    found = Classification(fault="x", owner=owner, reason="x") if owner else None
    known: dict[str, Any] = {"generation": 1, "step": 20, "cause": "SIGKILL", "time_ns": NOW_NS, "machine": "m1"}
    return Failure(symptom=symptom, classification=found, **(known | fields))


def facts(of: Failure | None = None, **fields: Any) -> LadderFacts:
    """Return facts with which each rung can be tried."""
    return LadderFacts(of or failure(), **({"back_to": "v1", "tests": ("bitwise",)} | fields))


def one(rung: Rung, of: Failure | None = None, **fields: Any) -> TriedRung:
    about = of or failure()
    known = about.model_dump(include={"symptom", "cause", "step", "machine", "time_ns", "generation"})
    return TriedRung(rung=rung, **(known | fields))


def climbed(at: LadderFacts, policy: RecoveryPolicy = POLICY) -> list[Rung]:
    """Return the rungs that are tried one after the other if none of them helps."""
    tried: list[TriedRung] = []
    while not (step := next_rung(with_tried(at, tried), policy)).last:
        tried.append(one(step.rung, at.failure, path=step.path))
    return [done.rung for done in tried]


def with_tried(at: LadderFacts, tried: list[TriedRung]) -> LadderFacts:
    fields = {name: getattr(at, name) for name in LadderFacts.__dataclass_fields__}
    return LadderFacts(**(fields | {"tried": tuple(tried)}))


@pytest.mark.parametrize(
    ("at", "path", "rungs"),
    [
        (facts(), "unclear", [R, D, R, B, P]),
        (facts(diagnose_at_once=True), "unclear-at-once", [D, R, B, P]),
        (facts(failure(Symptom.NOT_FINITE)), "not-finite", [D, R, B, P]),
        (facts(failure(Symptom.NOT_FINITE), blamed=True), "not-finite-new-code", [D, B, R, P]),
        (facts(failure(Symptom.EXCEPTION)), "user-error", [R, B]),
        (facts(failure(Symptom.EXCEPTION, Owner.CODE), recent=True), "new-code", [B, R]),
        (facts(failure(), blamed=True), "new-code", [B, R]),
        (facts(failure(Symptom.HANG), of_script=True), "user-error", [R, B]),
        (facts(failure(Symptom.HANG), of_script=True, recent=True), "new-code", [B, R]),
        (facts(failure(Symptom.EXCEPTION, Owner.STORAGE)), "elsewhere", [R]),
        (facts(failure(Symptom.CRASH, Owner.DATA), recent=True), "elsewhere", [R]),
        (facts(failure(Symptom.LAUNCH_FAILED)), "not-launched", [R, R, D, B, P]),
        (facts(failure(Symptom.CONNECTION_LOST)), "unclear", [R, D, R, B, P]),
        (facts(failure(), explained=True), "explained", [R]),
        (facts(failure(), hinted=True), "unclear", [R, D, R, B, P]),
        (facts(failure(Symptom.EXCEPTION), hinted=True, recent=True), "unclear", [R, D, R, B, P]),
        (facts(failure(Symptom.EXCEPTION, Owner.CODE), hinted=True), "user-error", [R, B]),
        (facts(failure(Symptom.UPDATE)), "update", [R]),
    ],
)
def test_each_kind_of_failure_has_its_path(at: LadderFacts, path: str, rungs: list[Rung]) -> None:
    assert path_of(at).name == path
    assert climbed(at) == rungs


def test_the_first_crash_leads_to_a_restart_and_the_second_one_to_tests() -> None:
    first = next_rung(facts(), POLICY)
    assert (first.rung, first.tried, first.text) == (R, False, "the cause is not known")
    second = next_rung(facts(tried=(one(R),)), POLICY)
    assert (second.rung, second.text) == (D, "the cause is not known; reattempt did not help")


def test_rungs_that_cannot_be_tried_are_skipped_with_the_reason() -> None:
    at = facts(tests=(), back_to="", no_replay="no replay is set up", tried=(one(R), one(R)))
    step = next_rung(at, POLICY)
    assert step.last and step.rung is R
    assert step.skipped == (
        "diagnose: there is nothing to test",
        "rollback: there is no version to go back to",
        "replay: no replay is set up",
    )


@pytest.mark.parametrize(
    ("mode", "rung", "asks"),
    [("act", D, False), ("approve", D, True), ("shadow", R, False), ("off", R, False), ("a later word", D, True)],
)
def test_the_mode_of_a_rung_decides_whether_it_is_tried(mode: str, rung: Rung, asks: bool) -> None:
    policy = RecoveryPolicy(ladder={"modes": {D: RungMode(mode)}})
    step = next_rung(facts(failure(Symptom.NOT_FINITE)), policy)
    assert (step.rung, step.asks) == (rung, asks)
    assert step.skipped == ((f"diagnose: its mode is {mode}",) if rung is R else ())
    approved = facts(failure(Symptom.NOT_FINITE), approved=frozenset({D}))
    assert not next_rung(approved, policy).asks


OTHER = failure(step=90, machine="m7")


@pytest.mark.parametrize(
    ("before", "counts"),
    [
        (one(R, failure(machine="m7")), True),
        (one(R, failure(step=3)), True),
        (one(R, OTHER), False),
        (one(R, failure(Symptom.HANG)), False),
        (one(R, time_ns=NOW_NS - 23 * HOUR_NS), True),
        (one(R, time_ns=NOW_NS - 25 * HOUR_NS), False),
        (one(R, failure(step=-1, machine="")), False),
    ],
)
def test_the_same_symptom_at_the_same_step_or_on_the_same_machine_starts_higher(
    before: TriedRung, counts: bool
) -> None:
    step = next_rung(facts(remembered=(before,)), POLICY)
    assert step.rung is (D if counts else R)


def test_a_failure_without_a_step_or_machine_is_not_the_same_fault_as_another() -> None:
    unknown = failure(step=-1, machine="")
    assert next_rung(facts(unknown, remembered=(one(R, unknown),)), POLICY).rung is R


def test_failures_that_name_no_machine_are_the_same_fault_at_any_step() -> None:
    """For example, a machine that sometimes computes wrongly causes a NaN on all ranks, each time at another step."""
    remembered: list[TriedRung] = []
    climbed_to = []
    for step in (20, 3000, 4500, 9000):
        nan = failure(Symptom.NOT_FINITE, step=step, machine="", time_ns=NOW_NS + step, generation=step)
        begun = next_rung(facts(nan, remembered=tuple(remembered)), POLICY)
        climbed_to.append(begun.rung)
        remembered.append(one(begun.rung, nan))
    assert climbed_to == [D, R, B, P]
    named = failure(Symptom.NOT_FINITE, step=9500, machine="m4", time_ns=NOW_NS + 9500)
    alone = POLICY.changed({"ladder.repeats": 0})
    assert next_rung(facts(named, remembered=tuple(remembered)), alone).rung is D
    assert next_rung(facts(named, remembered=tuple(remembered)), POLICY).last, (
        "after so many failures, attempts count for any machine"
    )


def test_a_job_remembers_the_attempts_that_can_still_count() -> None:
    old, new = one(R, time_ns=NOW_NS - 25 * HOUR_NS), one(R)
    assert kept([old, new], [one(D)], POLICY, most=10) == [new, one(D)]
    assert kept([new] * 9, [one(D)], POLICY, most=3) == [new, new, one(D)]
    assert kept([old], [], POLICY, most=3) == [old]
    unsolved = old.model_copy(update={"generation": 4})
    assert kept([unsolved, old], [one(D)], POLICY, most=10, unsolved={4}) == [unsolved, one(D)]
    of_machine = one(R, path="explained")
    assert kept([of_machine], [of_machine, one(D)], POLICY, most=10) == [one(D)], (
        "an attempt for a known cause is not kept"
    )


@pytest.mark.parametrize(
    ("before", "rung"),
    [
        (one(R, OTHER, generation=7), D),
        (one(R, OTHER, generation=7, time_ns=NOW_NS - 99 * HOUR_NS), D),
        (one(R, OTHER, generation=6), R),
        (one(R, OTHER, generation=7, symptom=Symptom.HANG), R),
        (one(R, OTHER, generation=7, path="explained"), R),
    ],
)
def test_attempts_for_an_unsolved_failure_count_at_any_step_and_machine(before: TriedRung, rung: Rung) -> None:
    assert next_rung(facts(remembered=(before,), unsolved=frozenset({7})), POLICY).rung is rung


@pytest.mark.parametrize("known", [{"explained": True}, {"of": failure(owner=Owner.STORAGE)}])
def test_attempts_for_faults_of_unknown_cause_do_not_count_for_a_known_cause(known: dict[str, Any]) -> None:
    before = tuple(one(R, machine=f"m{index}", generation=index, path="unclear") for index in range(9))
    step = next_rung(facts(remembered=before, **known), POLICY)
    assert (step.rung, step.last, step.restarts, step.tried) == (R, False, 0, False)
    here = next_rung(facts(tried=before, **known), POLICY)
    assert not here.last, "these attempts do not count in the same incident either"
    again = next_rung(facts(tried=(one(R, path=step.path),), **known), POLICY)
    assert again.last and again.restarts == 0


@pytest.mark.parametrize("path", ["update", "explained", "elsewhere"])
def test_attempts_for_a_known_cause_do_not_count_for_the_next_failure_of_the_incident(path: str) -> None:
    before = one(R, path=path, generation=2)
    error = failure(Symptom.EXCEPTION, generation=3)
    assert next_rung(facts(error, tried=(before,)), POLICY).rung is R
    again = (before, one(R, error, path="user-error", generation=3))
    assert next_rung(facts(failure(Symptom.EXCEPTION, generation=4), tried=again), POLICY).rung is B


def test_after_a_machine_left_the_job_is_reattempted_once_more() -> None:
    left = (one(R, path="unclear"), one(D, path="unclear"), one(R, path="explained"))
    assert next_rung(facts(failure(generation=3), tried=left), POLICY).rung is R


@pytest.mark.parametrize("known", [True, False])
def test_a_launch_after_a_known_cause_does_not_show_that_the_job_fails_at_one_step(known: bool) -> None:
    """Only a launch that failed for an unknown cause shows that. Then even code that ran well is rolled back."""
    looked = (one(R, OTHER, generation=5), one(D, OTHER, generation=6), one(R, OTHER, generation=6))
    fields: dict[str, Any] = {"unsolved": frozenset({5, 6}), "version": "v2", "ran_well_h": 99.0}
    at_once = one(R, generation=0, path="explained" if known else "unclear")
    assert (next_rung(facts(remembered=looked, tried=(at_once,), **fields), POLICY).rung is P) is known


def test_code_that_ran_well_is_not_rolled_back_unless_the_job_fails_again_at_one_step() -> None:
    looked = (one(R, OTHER, generation=5), one(D, OTHER, generation=6), one(R, OTHER, generation=6))
    known: dict[str, Any] = {"unsolved": frozenset({5, 6}), "version": "v2", "ran_well_h": 99.0}
    step = next_rung(facts(remembered=looked, **known), POLICY)
    assert (step.rung, step.skipped) == (P, ("rollback: v2 ran well for 99 h, and it fails at another step each time",))
    here = (*looked, one(R, generation=6))
    assert next_rung(facts(remembered=here, **known), POLICY).rung is B
    at_once = (*looked, one(R, generation=0))
    assert next_rung(facts(tried=at_once, **known), POLICY).rung is B, (
        "the job failed again at the same step in this incident"
    )
    assert next_rung(facts(failure(step=-1), remembered=looked, **known), POLICY).rung is B, (
        "the step of the failure is unknown"
    )


# Laws, which must be true for any facts.

SYMPTOMS = st.sampled_from([*Symptom, Symptom("a symptom of a later release")])
OWNERS = st.sampled_from(["", *Owner])
TRIED = st.lists(st.builds(one, st.sampled_from(Rung)), max_size=8).map(tuple)
FACTS = st.builds(
    LadderFacts,
    st.builds(failure, SYMPTOMS, OWNERS),
    explained=st.booleans(),
    hinted=st.booleans(),
    tried=TRIED,
    remembered=TRIED,
    blamed=st.booleans(),
    recent=st.booleans(),
    of_script=st.booleans(),
    back_to=st.sampled_from(["", "v1"]),
    tests=st.sampled_from([(), ("bitwise",)]),
    no_replay=st.sampled_from(["", "no"]),
    diagnose_at_once=st.booleans(),
)
POLICIES = st.builds(
    lambda modes: RecoveryPolicy(ladder={"modes": modes}),
    st.dictionaries(st.sampled_from([D, B, P]), st.sampled_from(RungMode), max_size=3),
)


@given(FACTS, POLICIES)
def test_the_ladder_ends(at: LadderFacts, policy: RecoveryPolicy) -> None:
    rungs = climbed(at, policy)
    assert len(rungs) <= len(path_of(at).rungs)


@given(FACTS, POLICIES)
def test_a_rung_to_be_skipped_is_not_chosen(at: LadderFacts, policy: RecoveryPolicy) -> None:
    step = next_rung(at, policy)
    if step.rung is not R:
        assert mode_of(step.rung, policy) in {RungMode.ACT, RungMode.APPROVE}
        assert step.asks == (mode_of(step.rung, policy) is RungMode.APPROVE)
    assert not (step.rung is D and not at.tests)
    assert not (step.rung is B and not at.back_to)
    assert not (step.rung is P and at.no_replay)


@given(FACTS, POLICIES)
def test_a_replay_comes_last_and_after_the_tests(at: LadderFacts, policy: RecoveryPolicy) -> None:
    rungs = climbed(at, policy)
    assert P not in rungs[:-1]
    if P in rungs and at.tests and mode_of(D, policy) in {RungMode.ACT, RungMode.APPROVE}:
        assert counted(at, policy)[D] or D in rungs


@given(FACTS, POLICIES)
def test_no_machine_is_tested_if_the_fault_is_elsewhere(at: LadderFacts, policy: RecoveryPolicy) -> None:
    if path_of(at).name in {"update", "explained", "elsewhere", "user-error", "new-code"}:
        assert not {D, P} & {*climbed(at, policy)}


@given(FACTS, POLICIES)
def test_a_rung_that_was_tried_is_followed_by_a_later_one(at: LadderFacts, policy: RecoveryPolicy) -> None:
    step = next_rung(at, policy)
    later = next_rung(with_tried(at, [*at.tried, one(step.rung, at.failure, path=step.path)]), policy)
    assert later.position > step.position or later.last


def test_the_last_path_fits_any_failure_and_names_of_paths_are_unique() -> None:
    assert len({path.name for path in PATHS}) == len(PATHS)
    assert all(PATHS[-1].fits(at) for at in (facts(), facts(failure(Symptom("new")))))
