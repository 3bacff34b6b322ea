"""How a drill checks updates: versions, and the version that ran each step."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from drills.faults.all import drill_request
from drills.faults.fault import fault_of
from drills.judge.facts import DrillFacts
from drills.judge.versions import steps_under_their_versions
from drills.observe.step_records import Records, ReportedStep
from drills.spec.request import DrillRequest
from everstep.model.incident import IncidentReport
from everstep.model.version import CodeVersion, JobVersion, VersionStatus

RUNS = CodeVersion(script="train.py")


def step(number: int, generation: int, version: int) -> ReportedStep:
    return ReportedStep(number, generation, 0, struct.pack("<d", 0.5), version)


def version(number: int, status: str, *ranges: tuple[int, int, int], why: str = "") -> JobVersion:
    return JobVersion(number=number, runs=RUNS, status=VersionStatus(status), ranges=list(ranges), why=why)


def report(resolution: str, headline: str = "Recovered") -> IncidentReport:
    values: dict[str, Any] = {"headline": headline, "resolution": resolution, "cause": "", "step": 3, "lost_steps": 0}
    values |= {"evicted": [], "stages": [], "generation": 2, "recovered": True, "seconds": 1.0, "failures": []}
    return IncidentReport(**values)


def update_right(
    request: DrillRequest, versions: list[JobVersion], records: Records, reports: list[IncidentReport]
) -> list[str]:
    facts = DrillFacts(versions=versions, records=records)
    return fault_of(request).problems(request, request.spec("job", {}), facts, reports)


UPDATED = [version(1, "replaced", (1, 0, 2)), version(2, "running", (2, 2, -1))]
STEPS = Records({0: [step(0, 1, 1), step(1, 1, 1), step(2, 2, 2), step(3, 2, 2)]})


def test_an_update_as_it_should_be() -> None:
    assert update_right(drill_request(fault="update"), UPDATED, STEPS, [report("update")]) == []


@pytest.mark.parametrize(
    ("versions", "resolution", "said"),
    [
        ([UPDATED[0]], "update", "the versions are v1 replaced"),
        ([*UPDATED, version(3, "running", (3, 4, -1))], "update", "v3 running"),
        ([UPDATED[0], version(2, "running", (2, 2, 3), (3, 3, -1))], "update", "was applied 2 times"),
        (UPDATED, "reattempt", "resolution is reattempt, and should be update"),
    ],
)
def test_what_is_applied_twice_or_not_at_all_is_wrong(versions: list[JobVersion], resolution: str, said: str) -> None:
    found = update_right(drill_request(fault="update"), versions, Records(), [report(resolution)])
    assert any(said in text for text in found), found


def test_a_bad_version_is_taken_back_and_its_owner_named() -> None:
    request = drill_request(fault="bad-version", fails_after=0)
    why = "v2, requested by drill: it failed before its first step"
    versions = [version(1, "running", (1, 0, 2), (3, 2, -1)), version(2, "suspect", (2, 2, 2), why=why)]
    records = Records({0: [step(0, 1, 1), step(1, 1, 1), step(2, 3, 1)]})
    assert update_right(request, versions, records, [report("rollback", why)]) == []
    nameless = [versions[0], version(2, "suspect", (2, 2, 2), why="it failed")]
    found = update_right(request, nameless, records, [report("rollback")])
    assert [text.partition(":")[0] for text in found] == [
        f"the reason for {nameless[1].name} does not name its operator",
        "the incident does not name the suspect",
    ]


@pytest.mark.parametrize(
    ("records", "said"),
    [
        ([step(1, 1, 1), step(2, 2, 1)], "v1 is recorded, and v2 ran in generation 2: step 2"),
        ([step(1, 1, 0)], "v0 is recorded"),
        ([step(2, 1, 1)], "v1 ran from 0 to 2 only: step 2"),
        ([step(1, 2, 2)], "v2 ran from 2 to -1 only: step 1"),
        ([step(0, 0, 1)], "generation 0 ran no version"),
    ],
)
def test_a_step_under_another_version_than_the_book_says_is_wrong(records: list[ReportedStep], said: str) -> None:
    [found] = steps_under_their_versions(UPDATED, Records({0: records}))
    assert said in found


def test_a_step_that_was_done_again_counts_as_it_was_done_last() -> None:
    again = Records({0: [step(1, 1, 1), step(2, 1, 1), step(2, 2, 2)]})
    assert steps_under_their_versions(UPDATED, again) == []
