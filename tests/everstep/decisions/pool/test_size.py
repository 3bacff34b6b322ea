"""The size of the pool: the paper's table, exact sums, and laws."""

from __future__ import annotations

from fractions import Fraction
from math import comb

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from everstep.decisions.pool.demand import FailureRecord, MachineFailure, Refill
from everstep.decisions.pool.size import PAPER_RATE, SHORT_DAYS, WINDOW_DAYS, binomial_quantile, pool_size

RATES = st.floats(0.0, 1.0)


def burst(machines: int, *, days: float = 30.0, every: int = 1) -> FailureRecord:
    """A cluster of 100 machines of which some fail together, each on a day of its own, and are back within hours."""
    times = [(day + 0.5, n) for day in range(0, int(days), every) for n in range(machines)]
    return FailureRecord(100, days, tuple(MachineFailure(f"m{n}-{at}", at, at + 0.2) for at, n in times))


@pytest.mark.parametrize(("machines", "standbys"), [(128, 2), (256, 2), (512, 3), (1024, 4)])
def test_the_papers_table(machines: int, standbys: int) -> None:
    """ByteRobust, table 5."""
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
        assume(abs(float(total) - 0.99) > 1e-9)  # a float may stand on the other side there
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
    """Near the mean and 2.33 standard deviations; the float of the chance that none fails would be 0."""
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


def test_a_short_record_leaves_it_to_the_binomial() -> None:
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


def test_there_are_no_more_standbys_than_machines_but_for_the_floor() -> None:
    everything = burst(4, days=30)
    assert pool_size(4, FailureRecord(4, 30, everything.failures)).standbys == 4
    assert (pool_size(4, None, floor=9).standbys, pool_size(4, None, floor=9).decided_by) == (9, "floor")
