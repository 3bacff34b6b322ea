"""Both rules on a year of a real cluster, where each day is sized from the days before it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from everstep.decisions.pool.demand import FailureRecord, MachineFailure, Refill, daily_demand
from everstep.decisions.pool.size import pool_size
from everstep.decisions.pool.walk_forward import walk_forward

TRACE = Path(__file__).parents[3] / "data" / "infinitehbd-failures.jsonl"
DAY_S = 86400


@pytest.fixture(scope="module")
def trace() -> FailureRecord:
    cluster, *rows = map(json.loads, TRACE.read_text().splitlines())
    failures = [MachineFailure(row["machine"], row["failed"] / DAY_S, row["repaired"] / DAY_S) for row in rows]
    return FailureRecord(cluster["machines"], cluster["until"] / DAY_S, tuple(failures))


def test_it_is_the_trace(trace: FailureRecord) -> None:
    assert (trace.machines, int(trace.days), len(trace.failures)) == (400, 348, 584)


def test_what_the_papers_rule_says_of_the_trace_would_not_have_been_enough(trace: FailureRecord) -> None:
    size = pool_size(trace.machines, trace)
    needed = daily_demand(trace, Refill.DAILY)
    assert (size.binomial, round(size.rate.per_day, 4)) == (5, 0.0042)
    assert sum(need <= 5 for need in needed) / len(needed) == pytest.approx(0.957, abs=0.0005)
    assert sum(need <= 14 for need in needed) / len(needed) == pytest.approx(0.991, abs=0.0005)


@pytest.mark.parametrize(
    ("refill", "held_by_papers", "most_idle"), [(Refill.DAILY, 0.95, 17), (Refill.REPAIR, 0.30, 26)]
)
def test_our_rule_holds_99_percent_of_days(
    trace: FailureRecord, refill: Refill, held_by_papers: float, most_idle: float
) -> None:
    binomial, record = walk_forward(trace, refill)
    assert record.share >= 0.99
    assert binomial.share < held_by_papers
    assert (binomial.days, record.days) == (348, 348)
    assert binomial.mean_idle < record.mean_idle < most_idle


def test_no_day_is_sized_from_what_came_later(trace: FailureRecord) -> None:
    """What the rules say of the first days is the same where nothing is known of the others."""
    early = walk_forward(trace.before(60), Refill.REPAIR)
    failures = tuple(failure for failure in trace.failures if failure.failed_day < 60)
    assert early == walk_forward(FailureRecord(trace.machines, 60, failures), Refill.REPAIR)


def test_a_record_of_no_day_says_nothing() -> None:
    for result in walk_forward(FailureRecord(4, 0.5), Refill.DAILY):
        assert (result.days, result.held, result.share, result.mean_standbys, result.mean_idle) == (0, 0, 0.0, 0.0, 0.0)
