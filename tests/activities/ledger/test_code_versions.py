"""Code versions in the ledger. It keeps the newest state of each version of each run."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from activities.ledger.ledger import Ledger
from activities.write_to_ledger import RecordJob
from everstep.base.redaction import HIDDEN
from everstep.model.job import JobSpec
from everstep.model.version import CodeVersion, JobVersion, UpdateRequest, VersionStatus
from tests.activities.performing import perform

SPEC = JobSpec(name="gpt", script="/srv/train.py")
ADA = UpdateRequest(operator="ada", reason="a better loss", env={"API_TOKEN": "hush"})


def version(number: int, status: VersionStatus = VersionStatus.RUNNING, **more: object) -> JobVersion:
    runs = CodeVersion(code="ab" * 32, script="train.py", args=[str(number)], env={"API_TOKEN": "hush"})
    return JobVersion(number=number, runs=runs, request=ADA, status=status, asked_ns=number).model_copy(update=more)


def test_the_newest_state_is_kept_in_whatever_order_states_arrive(ledger: Ledger) -> None:
    """Attempts of an activity may overlap. So the states may arrive in any order."""
    states = [VersionStatus.CHECKING, VersionStatus.PENDING, VersionStatus.RUNNING]
    for run, order in enumerate(itertools.permutations(range(3)), start=1):
        ledger.job_started(SPEC, started_ns=run * 100)
        for at in order:
            for _ in range(2):
                ledger.versions_seen("gpt", [version(1, states[at])], seen_ns=run * 100 + at)
        [found] = ledger.versions("gpt")
        assert (found.status, found.started_ns) == ("running", run * 100)


def test_all_details_of_a_version_are_kept(ledger: Ledger) -> None:
    ledger.job_started(SPEC, started_ns=1)
    given = version(2, VersionStatus.SUSPECT, ranges=[(2, 20, 25)], ended="rolled back to v1", changed="train.py +1\0")
    ledger.versions_seen("gpt", [version(1), given], seen_ns=5)
    ledger.job_ended("gpt", ended_ns=9, outcome="finished")
    first, second = ledger.versions("gpt")
    assert (first.number, second.number, second.id, second.outcome) == (1, 2, given.runs and given.runs.id, "finished")
    assert second.parsed() == given
    assert ledger.versions("other") == []


def test_a_late_state_is_added_to_its_own_run_of_the_name(ledger: Ledger) -> None:
    ledger.job_started(SPEC, started_ns=100)
    ledger.versions_seen("gpt", [version(1), version(2)], seen_ns=101)
    ledger.job_started(SPEC, started_ns=200)
    ledger.versions_seen("gpt", [version(1)], seen_ns=201)
    ledger.versions_seen("gpt", [version(2, VersionStatus.REPLACED)], seen_ns=150)
    assert [one.number for one in ledger.versions("gpt")] == [1]
    found = [(one.started_ns, one.number, one.status) for one in ledger.versions("gpt", all_runs=True)]
    assert found == [(100, 1, "running"), (100, 2, "replaced"), (200, 1, "running")]


def test_a_version_that_this_release_cannot_read_does_not_harm_others(ledger: Ledger) -> None:
    ledger.versions_seen("gpt", [version(1)], seen_ns=1)
    [found] = ledger.versions("gpt")
    assert found.model_copy(update={"version": {"number": "many"}}).parsed() is None
    assert found.parsed() is not None


@pytest.mark.parametrize("redact", [["*TOKEN*"]])
async def test_no_secret_is_written_to_the_ledger(tmp_path: Path, redact: list[str]) -> None:
    spec = SPEC.model_copy(update={"redact": redact})
    with Ledger.open(f"sqlite:///{tmp_path}/ledger.db") as ledger:
        entry = RecordJob(spec=spec, time_ns=5, started_ns=5, versions=[version(1)])
        for _ in range(2):  # the first attempt succeeded, but its answer was lost
            await perform(entry, ledger=ledger)
        [found] = ledger.versions("gpt")
    kept = found.parsed()
    assert kept is not None
    assert kept.runs is not None
    assert kept.runs.env == {"API_TOKEN": HIDDEN}
    assert "hush" not in str(found.version)
