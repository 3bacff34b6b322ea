"""Which version is taken back, for what, and to which one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.decisions.act.versions.book import VersionBook
from everstep.decisions.act.versions.next_version import next_version
from everstep.decisions.act.versions.rollback import Blame, blame, is_young, made_by, older_state, rollback, target_of
from everstep.model.evidence import Classification
from everstep.model.incident import Failure, Symptom
from everstep.model.recovery_policy import RecoveryPolicy
from everstep.model.version import CodeVersion, JobVersion, Origin, UpdateRequest, VersionStatus

S = 10**9
BEGAN = 1_000 * S
POLICY = RecoveryPolicy(rollback={"steps": 20, "within_s": 300})


def version(number: int, *, begin: int = 0, end: int = -1, **fields: object) -> JobVersion:
    """One that came at a step and with the generation of its number."""
    defaults: dict[str, object] = {
        "runs": CodeVersion(code=f"{number:064d}", script="train.py", origin=Origin(commit="1f3870be", author="Ada")),
        "status": VersionStatus.RUNNING if end < 0 else VersionStatus.REPLACED,
        "began_ns": BEGAN,
        "ranges": [(number, begin, end)],
        "request": UpdateRequest(operator="ada"),
    }
    return JobVersion.model_validate({"number": number, **defaults, **fields})


def failure(
    symptom: Symptom = Symptom.USER_ERROR, *, step: int = 105, after_s: float = 10, **fields: object
) -> Failure:
    made = {"generation": 2, "step": step, "symptom": symptom, "cause": "KeyError", "time_ns": BEGAN + int(after_s * S)}
    return Failure.model_validate(made | fields)


OLD, NEW = version(1, end=100, steady=True), version(2, begin=100)


@pytest.mark.parametrize(
    ("failed", "explained", "expected"),
    [
        (failure(), False, Blame.CODE),
        (failure(), True, Blame.OTHER),
        (failure(Symptom.NOT_FINITE), False, Blame.CODE),
        (failure(Symptom.HANG), False, Blame.CODE),
        (failure(Symptom.EARLY_EXIT), False, Blame.CODE),
        (failure(Symptom.LAUNCH_FAILED), False, Blame.CODE),
        (failure(Symptom.CRASH, cause="SIGSEGV"), False, Blame.CODE),
        (failure(Symptom.CRASH, cause="exit code 3"), False, Blame.CODE),
        (failure(Symptom.CRASH, cause="SIGKILL"), False, Blame.UNCLEAR),
        (failure(Symptom.CRASH, cause="exit status unknown"), False, Blame.UNCLEAR),
        (failure(Symptom.CONNECTION_LOST), False, Blame.UNCLEAR),
        (failure(Symptom.UNSAVED), False, Blame.UNCLEAR),
        (failure(Symptom("of a later release")), False, Blame.UNCLEAR),
        (failure(Symptom.MACHINE_SILENT), False, Blame.OTHER),
        (failure(Symptom.UPDATE), False, Blame.OTHER),
    ],
)
def test_what_code_can_cause(failed: Failure, explained: bool, expected: Blame) -> None:
    assert blame(failed, explained=explained) is expected


@pytest.mark.parametrize("owner", ["machine", "network", "storage", "scheduler"])
def test_what_the_output_blames_on_others_is_not_the_codes(owner: str) -> None:
    found = Classification(fault="x", owner=owner, reason="x")
    assert blame(failure(classification=found), explained=False) is Blame.OTHER


def test_one_in_its_first_steps_is_taken_back_to_the_one_before() -> None:
    found = rollback([OLD, NEW], 2, failure(), explained=False, policy=POLICY)
    assert found is not None
    assert (found.suspect, found.target, found.why) == (2, 1, "it failed after 5 steps: KeyError")
    before = rollback([OLD, NEW], 2, failure(step=100), explained=False, policy=POLICY)
    assert before is not None
    assert before.why == "it failed before its first step: KeyError"


def test_what_may_be_the_codes_counts_the_second_time() -> None:
    killed = failure(Symptom.CRASH, cause="SIGKILL")
    assert rollback([OLD, NEW.model_copy(update={"failed": 1})], 2, killed, explained=False, policy=POLICY) is None
    found = rollback([OLD, NEW.model_copy(update={"failed": 2})], 2, killed, explained=False, policy=POLICY)
    assert found is not None
    assert found.why == "it failed after 5 steps, 2 times: SIGKILL"


@pytest.mark.parametrize(
    ("step", "after_s", "young"),
    [
        (119, 10_000, True),
        (120, 10_000, False),
        (10_000, 299, True),
        (10_000, 300, False),
        (-1, 299, True),
        (-1, 300, False),
    ],
)
def test_it_is_young_by_its_steps_or_its_time(step: int, after_s: float, young: bool) -> None:
    assert is_young(NEW, step, BEGAN + int(after_s * S), POLICY) is young


def test_what_is_steady_or_began_before_versions_were_known_is_not_taken_back() -> None:
    steady, unknown = NEW.model_copy(update={"steady": True}), NEW.model_copy(update={"began_ns": 0})
    for one in (steady, unknown):
        assert rollback([OLD, one], 2, failure(), explained=False, policy=POLICY) is None


def test_the_first_version_of_a_job_has_nothing_to_go_back_to() -> None:
    assert rollback([version(1)], 1, failure(), explained=False, policy=POLICY) is None
    never_ran = version(2, ranges=[], status=VersionStatus.REFUSED)
    assert rollback([version(1), never_ran], 1, failure(), explained=False, policy=POLICY) is None


def test_the_last_steady_one_is_chosen_and_never_a_suspect() -> None:
    versions = [
        version(1, end=50, steady=True),
        version(2, begin=50, end=100, steady=True),
        version(3, begin=100, end=101),
        version(4, begin=101, end=102, status=VersionStatus.SUSPECT),
        version(5, begin=101),
    ]
    target = target_of(versions, 5)
    assert target is not None
    assert target.number == 2
    none_steady = [one.model_copy(update={"steady": False}) for one in versions]
    target = target_of(none_steady, 5)
    assert target is not None
    assert target.number == 3, "the one before it"


def test_a_state_that_only_the_suspect_can_read_is_not_gone_on_from() -> None:
    suspect = version(2, begin=100, end=105, status=VersionStatus.SUSPECT)
    assert older_state([OLD, suspect], 1, 105) == 100
    assert older_state([OLD, suspect], 1, 100) is None, "that one it did not save"
    assert older_state([OLD, NEW], 1, 105) is None, "none was taken back"


def test_what_was_saved_after_a_version_was_taken_back_is_gone_on_from() -> None:
    """An update that fails in its restore, long after another one that did: the state is of the version between."""
    old = version(1, ranges=[(1, 0, 25), (3, 75, 280)])
    suspect = version(2, begin=25, end=75, status=VersionStatus.SUSPECT)
    assert older_state([old, suspect, version(3, ranges=[(4, 280, -1)])], 3, 280) is None
    assert older_state([old, suspect], 1, 75) == 25
    again = version(3, begin=280, end=300, status=VersionStatus.SUSPECT)
    assert older_state([old, suspect, again], 1, 300) == 280


CHANGED = "1 file changed: train.py +1 -1\n\n--- train.py\n+++ train.py\n-lr = 1\n+lr = 2"


def test_who_made_a_suspect_and_what_it_changed_is_told() -> None:
    origin = Origin(commit="1f3870be274f6c49", author="Bob <bob@example.org>", subject="Faster")
    suspect = version(2, begin=100, changed=CHANGED, runs=CodeVersion(script="train.py", origin=origin))
    made = "asked for by ada, commit 1f3870be2 of Bob <bob@example.org> ('Faster'), 1 file changed: train.py +1 -1"
    assert made_by(suspect) == made
    book = VersionBook.of([OLD, suspect], 2)
    change = next_version(book, failure(), POLICY, explained=False, by_operator=False)
    assert change is not None
    assert (
        change.why
        == f"back to v1: v2, {made}: it failed after 5 steps: KeyError"
        == f"back to v1: v2, {change.suspect}"
    )


def test_so_it_is_where_an_operator_takes_it_back() -> None:
    book = VersionBook.of([OLD, NEW.model_copy(update={"changed": CHANGED})], 2)
    book.wait_for_restart(1, BEGAN, UpdateRequest(operator="eve", reason="a worse loss", version=1, rollback=True))
    change = next_version(book, failure(Symptom.UPDATE), POLICY, explained=False, by_operator=False)
    assert change is not None and change.suspect == "taken back by eve: a worse loss"
    assert change.why.startswith("back to v1 by eve: a worse loss (v2, asked for by ada, commit 1f3870be of Ada")
    assert change.why.endswith("1 file changed: train.py +1 -1)")


numbers = st.integers(1, 6)
statuses = st.sampled_from(
    [VersionStatus.REPLACED, VersionStatus.SUSPECT, VersionStatus.REFUSED, VersionStatus.PENDING]
)


@given(
    st.lists(st.tuples(statuses, st.booleans(), st.booleans()), min_size=1, max_size=6),
    st.sampled_from(list(Symptom)),
    st.booleans(),
    st.integers(-1, 200),
)
def test_whatever_is_taken_back_goes_to_one_that_ran_and_is_not_suspect(
    others: list[tuple[VersionStatus, bool, bool]], symptom: Symptom, explained: bool, step: int
) -> None:
    versions = [
        version(n, begin=n, end=n + 1, status=status, steady=steady, ranges=[(n, n, n + 1)] if ran else [])
        for n, (status, steady, ran) in enumerate(others, 1)
    ]
    running = len(versions) + 1
    versions.append(version(running, begin=running, failed=2))
    found = rollback(versions, running, failure(symptom, step=step), explained=explained, policy=POLICY)
    if found is not None:
        target = versions[found.target - 1]
        assert target.number != running
        assert target.ranges
        assert target.status is not VersionStatus.SUSPECT
        assert not explained
    elif not explained and symptom is Symptom.USER_ERROR:
        assert all(not one.ranges or one.status is VersionStatus.SUSPECT for one in versions[:-1])
