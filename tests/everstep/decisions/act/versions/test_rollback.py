"""Rollbacks: for which failures a version is rolled back, and to which version."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.decisions.act.versions.book import VersionBook
from everstep.decisions.act.versions.next_version import next_version
from everstep.decisions.act.versions.rollback import (
    Blame,
    Rollback,
    blame,
    is_young,
    made_by,
    older_state,
    rollback,
    target_of,
)
from everstep.model.evidence import Classification
from everstep.model.incident import Failure, Symptom
from everstep.model.recovery_policy import RecoveryPolicy
from everstep.model.version import CodeVersion, JobVersion, Origin, UpdateRequest, VersionStatus

S = 10**9
BEGAN = 1_000 * S
POLICY = RecoveryPolicy(rollback={"steps": 20, "within_s": 300})


def version(number: int, *, begin: int = 0, end: int = -1, **fields: object) -> JobVersion:
    """Return a version that began at a step, in the generation that has the version's number."""
    defaults: dict[str, object] = {
        "runs": CodeVersion(code=f"{number:064d}", script="train.py", origin=Origin(commit="1f3870be", author="Ada")),
        "status": VersionStatus.RUNNING if end < 0 else VersionStatus.REPLACED,
        "began_ns": BEGAN,
        "ranges": [(number, begin, end)],
        "request": UpdateRequest(operator="ada"),
    }
    return JobVersion.model_validate({"number": number, **defaults, **fields})


def failure(symptom: Symptom = Symptom.EXCEPTION, *, step: int = 105, after_s: float = 10, **fields: object) -> Failure:
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
def test_whether_code_can_have_caused_a_failure(failed: Failure, explained: bool, expected: Blame) -> None:
    assert blame(failed, explained=explained) is expected


@pytest.mark.parametrize("owner", ["machine", "network", "storage", "scheduler"])
def test_a_failure_that_the_output_blames_on_something_else_is_not_blamed_on_the_code(owner: str) -> None:
    classified = Classification(fault="x", owner=owner, reason="x")
    assert blame(failure(classification=classified), explained=False) is Blame.OTHER


KILLED = failure(Symptom.CRASH, cause="SIGKILL")


@pytest.mark.parametrize(
    ("failed", "times", "why"),
    [
        (failure(), 0, "it failed after 5 steps: KeyError"),
        (failure(step=100), 0, "it failed before its first step: KeyError"),
        (KILLED, 1, None),
        (KILLED, 2, "it failed after 5 steps, 2 times: SIGKILL"),
    ],
)
def test_a_young_version_is_rolled_back_at_once_or_after_a_second_failure_that_may_have_another_cause(
    failed: Failure, times: int, why: str | None
) -> None:
    back = rollback([OLD, NEW.model_copy(update={"failed": times})], 2, failed, explained=False, policy=POLICY)
    assert back == (None if why is None else Rollback(2, 1, why))


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
def test_a_version_is_young_by_its_steps_or_its_time(step: int, after_s: float, young: bool) -> None:
    assert is_young(NEW, step, BEGAN + int(after_s * S), POLICY) is young


@pytest.mark.parametrize("fields", [{"steady": True}, {"began_ns": 0}])
def test_a_version_that_is_steady_or_of_unknown_begin_is_not_rolled_back(fields: dict[str, object]) -> None:
    assert rollback([OLD, NEW.model_copy(update=fields)], 2, failure(), explained=False, policy=POLICY) is None


def test_the_first_version_of_a_job_is_not_rolled_back() -> None:
    never_ran = version(2, ranges=[], status=VersionStatus.REFUSED)
    for versions in ([version(1)], [version(1), never_ran]):
        assert rollback(versions, 1, failure(), explained=False, policy=POLICY) is None


def test_the_target_is_the_last_steady_version_and_never_a_suspect() -> None:
    versions = [
        version(1, end=50, steady=True),
        version(2, begin=50, end=100, steady=True),
        version(3, begin=100, end=101),
        version(4, begin=101, end=102, status=VersionStatus.SUSPECT),
        version(5, begin=101),
    ]
    none_steady = [version.model_copy(update={"steady": False}) for version in versions]
    assert target_of(versions, 5) is versions[1]
    assert target_of(none_steady, 5) is none_steady[2], (
        "without a steady version, the target is the version that ran before"
    )


def test_a_state_that_only_a_suspect_version_can_read_is_not_used() -> None:
    suspect = version(2, begin=100, end=105, status=VersionStatus.SUSPECT)
    assert older_state([OLD, suspect], 1, 105) == 100
    assert older_state([OLD, suspect], 1, 100) is None, "the suspect version did not save step 100"
    assert older_state([OLD, NEW], 1, 105) is None, "no version was rolled back"


def test_a_state_that_was_saved_after_a_rollback_is_used() -> None:
    """A restore fails after an update. Version 1 saved that state, after the rollback of an earlier update."""
    old = version(1, ranges=[(1, 0, 25), (3, 75, 280)])
    suspect = version(2, begin=25, end=75, status=VersionStatus.SUSPECT)
    assert older_state([old, suspect, version(3, ranges=[(4, 280, -1)])], 3, 280) is None
    assert older_state([old, suspect], 1, 75) == 25
    again = version(3, begin=280, end=300, status=VersionStatus.SUSPECT)
    assert older_state([old, suspect, again], 1, 300) == 280


CHANGED = "1 file changed: train.py +1 -1\n\n--- train.py\n+++ train.py\n-lr = 1\n+lr = 2"


def test_a_rollback_names_the_origin_and_the_changes_of_the_suspect_version() -> None:
    origin = Origin(commit="1f3870be274f6c49", author="Bob <bob@example.org>", subject="Faster")
    suspect = version(2, begin=100, changed=CHANGED, runs=CodeVersion(script="train.py", origin=origin))
    made = "requested by ada, commit 1f3870be2 of Bob <bob@example.org> ('Faster'), 1 file changed: train.py +1 -1"
    assert made_by(suspect) == made

    book = VersionBook.of([OLD, suspect], 2)
    change = next_version(book, failure(), POLICY, explained=False, by_operator=False)
    assert change is not None and change.suspect == f"{made}: it failed after 5 steps: KeyError"
    assert change.why == f"back to v1: v2, {change.suspect}"

    book.wait_for_restart(1, BEGAN, UpdateRequest(operator="eve", reason="a worse loss", version=1, rollback=True))
    by_operator = next_version(book, failure(Symptom.UPDATE), POLICY, explained=False, by_operator=False)
    assert by_operator is not None and by_operator.suspect == "rolled back by eve: a worse loss"
    assert by_operator.why == f"back to v1 by eve: a worse loss (v2, {made})"


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
def test_the_target_of_a_rollback_ran_before_and_is_not_suspect(
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
    elif not explained and symptom is Symptom.EXCEPTION:
        assert all(not one.ranges or one.status is VersionStatus.SUSPECT for one in versions[:-1])
