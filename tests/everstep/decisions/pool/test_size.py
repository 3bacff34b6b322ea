"""The size of the pool: the paper's table, exact sums, and laws."""

from __future__ import annotations

import json
from fractions import Fraction
from math import comb
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from everstep.decisions.pool.demand import FailureRecord, MachineFailure, Refill, daily_demand
from everstep.decisions.pool.size import (
    PAPER_RATE,
    SHORT_DAYS,
    WINDOW_DAYS,
    FailureRate,
    binomial_quantile,
    failure_rate,
    pool_size,
    walk_forward,
)

RATES = st.floats(0.0, 1.0)


def burst(machines: int, *, days: float = 30.0, every: int = 1) -> FailureRecord:
    """Record a cluster of 100 machines. On several days, some fail together, and are back within hours."""
    times = [(day + 0.5, n) for day in range(0, int(days), every) for n in range(machines)]
    return FailureRecord(100, days, tuple(MachineFailure(f"m{n}-{at}", at, at + 0.2) for at, n in times))


@pytest.mark.parametrize(("machines", "standbys"), [(128, 2), (256, 2), (512, 3), (1024, 4)])
def test_the_papers_table(machines: int, standbys: int) -> None:
    """These are the numbers of ByteRobust's table 5."""
    assert binomial_quantile(machines, PAPER_RATE) == standbys
    size = pool_size(machines, None)
    assert (size.standbys, size.decided_by, size.rate.source, size.record) == (standbys, "binomial", "paper", None)


@settings(max_examples=60)
@given(st.integers(1, 60), st.integers(0, 1000))
def test_the_quantile_equals_an_exact_sum(machines: int, thousandths: int) -> None:
    rate = thousandths / 1000
    exact = Fraction(rate)
    total = Fraction(0)
    for count in range(machines + 1):
        total += comb(machines, count) * exact**count * (1 - exact) ** (machines - count)
        assume(abs(float(total) - 0.99) > 1e-9)  # so close to 0.99, a float may be on the other side
        if total >= Fraction(99, 100):
            break
    assert binomial_quantile(machines, rate) == count


@pytest.mark.parametrize(
    ("machines", "rate", "low", "high"),
    [
        (100_000, 0.0012, 146, 146),
        (100_000, 0.5, 50_367, 50_369),
        (100_000, 0.999, 99_922, 99_924),
        (300, 0.9, 281, 282),
    ],
)
def test_the_quantile_of_many_machines(machines: int, rate: float, low: int, high: int) -> None:
    """The quantile is near the mean plus 2.33 standard deviations.

    This is also true where the probability of no failure at all is too small for a float.
    """
    assert low <= binomial_quantile(machines, rate) <= high


@settings(max_examples=50)
@given(st.integers(0, 3000), st.integers(0, 3000), RATES, RATES)
def test_the_quantile_grows_with_machines_and_with_the_rate(few: int, many: int, rare: float, often: float) -> None:
    few, many = sorted((few, many))
    rare, often = sorted((rare, often))
    assert 0 <= binomial_quantile(few, rare) <= binomial_quantile(many, rare) <= many
    assert binomial_quantile(many, rare) <= binomial_quantile(many, often)


@settings(max_examples=50)
@given(st.integers(1, 400), st.integers(1, 400), st.integers(0, 20), st.integers(0, 40), st.sampled_from(list(Refill)))
def test_the_answer_grows_with_machines_and_is_never_below_a_rule_or_the_floor(
    few: int, many: int, together: int, floor: int, refill: Refill
) -> None:
    few, many = sorted((few, many))
    record = burst(together)
    small, large = (pool_size(machines, record, refill=refill, floor=floor) for machines in (few, many))
    assert small.standbys <= large.standbys
    assert small.record is not None
    assert small.standbys == max(floor, small.binomial, small.record.standbys)


@settings(max_examples=30)
@given(st.integers(0, 40), st.integers(0, 40), st.sampled_from(list(Refill)))
def test_the_answer_grows_with_the_failures(fewer: int, more: int, refill: Refill) -> None:
    fewer, more = sorted((fewer, more))
    assert pool_size(100, burst(fewer), refill=refill).standbys <= pool_size(100, burst(more), refill=refill).standbys


def test_bursts_need_more_than_the_binomial_says() -> None:
    size = pool_size(100, burst(9, every=10, days=60), refill=Refill.DAILY)
    assert size.binomial == 3
    assert size.record is not None
    assert (size.record.days, size.record.peak, size.record.margin) == (60, 9, 5)
    assert (size.standbys, size.decided_by) == (14, "record")


def test_with_a_short_record_the_binomial_decides() -> None:
    short, enough = (pool_size(100, burst(9, days=days)) for days in (SHORT_DAYS - 0.1, SHORT_DAYS))
    assert (short.record, short.decided_by) == (None, "binomial")
    assert short.standbys == short.binomial > pool_size(100, None).standbys
    assert enough.decided_by == "record"


def test_old_bursts_are_forgotten() -> None:
    bursts = burst(9, days=3).failures
    old, young = (pool_size(100, FailureRecord(100, days, bursts)).record for days in (WINDOW_DAYS + 3, WINDOW_DAYS))
    assert old is not None
    assert young is not None
    assert (old.peak, young.peak) == (0, 9)


def test_standbys_exceed_machines_only_by_the_floor() -> None:
    everything = burst(4, days=30)
    assert pool_size(4, FailureRecord(4, 30, everything.failures)).standbys == 4
    assert (pool_size(4, None, floor=9).standbys, pool_size(4, None, floor=9).decided_by) == (9, "floor")


def seen(failures: int, *, machines: int = 400, days: float = 349.0) -> FailureRecord:
    return FailureRecord(machines, days, tuple(MachineFailure(f"m{n % machines}", 0.5) for n in range(failures)))


@pytest.mark.parametrize("record", [None, FailureRecord(4, 0.0), FailureRecord(0, 9.0)])
def test_without_a_record_the_rate_is_the_papers(record: FailureRecord | None) -> None:
    assert failure_rate(record) == FailureRate(PAPER_RATE, "paper")


def test_a_long_record_replaces_the_papers() -> None:
    found = failure_rate(seen(584))
    assert found.per_day == pytest.approx(584 / (400 * 349), rel=0.01)
    assert (found.source, found.failures, found.machine_days) == ("record", 584, 400 * 349)


def test_a_short_record_without_a_failure_does_not_make_the_rate_zero() -> None:
    assert failure_rate(seen(0, machines=4, days=2)).per_day == pytest.approx(PAPER_RATE, rel=0.01)
    assert failure_rate(seen(0)).per_day < PAPER_RATE / 100


@given(st.integers(0, 50), st.integers(1, 100), st.floats(0.1, 100))
def test_more_failures_raise_it_and_it_stays_a_probability(failures: int, machines: int, days: float) -> None:
    fewer = failure_rate(seen(failures, machines=machines, days=days)).per_day
    more = failure_rate(seen(failures + 1, machines=machines, days=days)).per_day
    assert 0 < fewer <= more <= 1


TRACE = Path(__file__).parents[3] / "data" / "infinitehbd-failures.jsonl"
DAY_S = 86400


@pytest.fixture(scope="module")
def trace() -> FailureRecord:
    cluster, *rows = map(json.loads, TRACE.read_text().splitlines())
    failures = [MachineFailure(row["machine"], row["failed"] / DAY_S, row["repaired"] / DAY_S) for row in rows]
    return FailureRecord(cluster["machines"], cluster["until"] / DAY_S, tuple(failures))


def test_it_is_the_trace(trace: FailureRecord) -> None:
    assert (trace.machines, int(trace.days), len(trace.failures)) == (400, 348, 584)


def test_the_papers_rule_would_not_have_been_enough_for_the_trace(trace: FailureRecord) -> None:
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
    """The sizes for the first days are the same without the later days."""
    early = walk_forward(trace.before(60), Refill.REPAIR)
    failures = tuple(failure for failure in trace.failures if failure.failed_day < 60)
    assert early == walk_forward(FailureRecord(trace.machines, 60, failures), Refill.REPAIR)


def test_a_record_of_no_day_has_no_answer() -> None:
    for result in walk_forward(FailureRecord(4, 0.5), Refill.DAILY):
        assert (result.days, result.held, result.share, result.mean_standbys, result.mean_idle) == (0, 0, 0.0, 0.0, 0.0)
