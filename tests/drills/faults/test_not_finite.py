"""The judge of drills with a NaN.

An incident must name the NaN and the rank that had it first, and the job must resume from before the NaN.
"""

from __future__ import annotations

import math
import struct

import pytest

from drills.faults.all import drill_request
from drills.faults.fault import fault_of
from drills.judge.facts import DrillFacts
from drills.observe.step_records import Records, ReportedStep
from everstep.model.incident import Failure, IncidentReport, Symptom

REQUEST = drill_request(fault="nan", ranks=[5], at_step=20)
SPEC = REQUEST.spec("job", {})
SHARED = "the loss is NaN or infinite since step 20, on all 8 ranks"
NAMED = "the loss is NaN or infinite since step 20, first on rank 5 on m2"


def records(bad_from: dict[int, int]) -> Records:
    """Return losses of all ranks in 30 steps. ``bad_from``: rank → step from which on its losses are NaN."""

    def loss(rank: int, step: int) -> float:
        return math.nan if step >= bad_from.get(rank, 99) else 1.0

    return Records(
        {
            rank: [ReportedStep(step, 1, step, struct.pack("<d", loss(rank, step))) for step in range(30)]
            for rank in range(8)
        }
    )


def report(headline: str, *, resume_step: int = 15, symptom: Symptom = Symptom.NOT_FINITE) -> IncidentReport:
    return IncidentReport(
        headline=headline,
        resolution="reattempt",
        cause=str(symptom),
        step=20,
        lost_steps=7,
        evicted=[],
        stages=[],
        generation=2,
        recovered=True,
        seconds=1.0,
        failures=[Failure(generation=1, step=20, symptom=symptom, cause=str(symptom))],
        resume_step=resume_step,
    )


def wrong(one: IncidentReport, bad_from: dict[int, int]) -> list[str]:
    return fault_of(REQUEST).problems(REQUEST, SPEC, DrillFacts(records=records(bad_from)), [one])


EVERYWHERE = dict.fromkeys(range(8), 20)
ONE_FIRST = dict.fromkeys(range(8), 21) | {5: 20}


@pytest.mark.parametrize(
    ("one", "bad_from", "says"),
    [
        (report(SHARED), EVERYWHERE, ""),
        (report(NAMED), ONE_FIRST, ""),
        (report(NAMED, resume_step=20), ONE_FIRST, ""),
        (report(SHARED), ONE_FIRST, "rank 5 on m2 had it first"),
        (report(SHARED, symptom=Symptom.HANG), EVERYWHERE, "something else was reported"),
        (report(SHARED.replace("20", "21")), EVERYWHERE, "something else was reported"),
        (report(SHARED, resume_step=21), EVERYWHERE, "the job resumed from step 21, not from one of 10 to 20"),
        (report(SHARED, resume_step=5), EVERYWHERE, "the job resumed from step 5"),
    ],
)
def test_each_problem_of_an_incident_is_named(one: IncidentReport, bad_from: dict[int, int], says: str) -> None:
    found = wrong(one, bad_from)
    assert len(found) == bool(says) and all(says in text for text in found)


def test_finite_numbers_are_not_judged() -> None:
    finite = drill_request(fault="bitflip", machine="m1", finite=True)
    assert fault_of(finite).problems(finite, SPEC, DrillFacts(), [report("rank 5 ended")]) == []
