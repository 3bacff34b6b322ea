"""A version that was rolled back is no longer suspect if the job then fails in the same way."""

import pytest

from everstep.decisions.act.recover.tried_rungs import TriedRungs
from everstep.decisions.act.versions.book import VersionBook
from everstep.model.incident import Failure, Symptom
from everstep.model.ladder import Rung, TriedRung
from everstep.model.version import JobVersion, VersionStatus

HOUR_NS = 3600 * 10**9
FAILURE = Failure(generation=3, step=40, symptom=Symptom.CRASH, cause="ValueError", time_ns=100 * HOUR_NS)
TAKEN_BACK = TriedRung(
    rung=Rung.ROLLBACK, symptom=Symptom.CRASH, cause="ValueError", step=20, time_ns=FAILURE.time_ns, generation=2
)


def status_after(tried: list[TriedRung], remembered: list[TriedRung]) -> VersionStatus:
    left = JobVersion(number=2, status=VersionStatus.SUSPECT, ended="rolled back to v1: it failed")
    book = VersionBook.of([JobVersion(number=1, status=VersionStatus.RUNNING), left], 1)
    TriedRungs(tried=tried, remembered=remembered).clear_code(FAILURE, book, {2})
    return book.versions[2].status


@pytest.mark.parametrize("in_this_incident", [True, False])
def test_a_version_is_cleared_if_its_rollback_did_not_help(in_this_incident: bool) -> None:
    tried, remembered = ([TAKEN_BACK], []) if in_this_incident else ([], [TAKEN_BACK])
    assert status_after(tried, remembered) is VersionStatus.REPLACED


@pytest.mark.parametrize(
    "remembered",
    [
        [],
        [TAKEN_BACK.model_copy(update={"cause": "KeyError"})],
        [TAKEN_BACK.model_copy(update={"generation": 1})],
        [TAKEN_BACK, TAKEN_BACK.model_copy(update={"rung": Rung.REPLAY})],
    ],
)
def test_another_fault_or_a_solved_fault_clears_no_version(remembered: list[TriedRung]) -> None:
    assert status_after([], remembered) is VersionStatus.SUSPECT
