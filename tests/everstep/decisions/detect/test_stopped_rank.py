"""A rank whose process is stopped is a hang within a second; one that is stopped for a moment is not, nor are all."""

from __future__ import annotations

from dataclasses import replace

import pytest

from everstep.decisions.detect.hang import find_stopped_rank
from everstep.decisions.detect.job_facts import JobFacts
from everstep.model.incident import Symptom
from tests.everstep.decisions.detect.job_facts import RANK, S, facts

OTHER = replace(RANK, rank=1, machine="m1")


def stopped(*, for_s: float = 1.0, quiet_s: float = 1.0, both: bool = False) -> JobFacts:
    since_ns = round((100 - for_s) * S)
    first = replace(RANK, stopped_ns=since_ns if both else 0)
    return facts(ranks=[first, replace(OTHER, stopped_ns=since_ns)], quiet_s=quiet_s)


def test_it_is_told_with_rank_and_machine() -> None:
    found = find_stopped_rank(stopped())
    assert found is not None
    assert (found.symptom, found.ranks, found.machines) == (Symptom.HANG, [1], ["m1"])
    assert found.headline == "rank 1 on m1 is stopped (state T), and no rank completed a step for 1.0 s"


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (stopped(for_s=0.2), "somebody looks into it for a moment"),
        (stopped(quiet_s=0.2), "others step"),
        (stopped(both=True), "all are stopped, on purpose"),
        (facts(ranks=[RANK, OTHER], quiet_s=9), "nobody is stopped"),
        (
            facts(ranks=[replace(RANK, stopped_ns=round(99.8 * S)), replace(OTHER, stopped_ns=99 * S)], quiet_s=9),
            "all are stopped, one after the other",
        ),
        (
            facts(ranks=[replace(RANK, continued_ns=round(99.5 * S)), replace(OTHER, stopped_ns=50 * S)], quiet_s=50),
            "all are continued, one after the other",
        ),
        (replace(stopped(), newest=False), "it is of an earlier generation"),
    ],
)
def test_it_is_left_alone(found: JobFacts, why: str) -> None:
    assert find_stopped_rank(found) is None, why


def test_who_stays_stopped_while_the_others_were_continued_is_told() -> None:
    found = find_stopped_rank(
        facts(ranks=[replace(RANK, continued_ns=97 * S), replace(OTHER, stopped_ns=50 * S)], quiet_s=50)
    )
    assert found is not None and found.ranks == [1]
