"""The failure rate: a paper's where nothing was seen, then more and more what was seen."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.decisions.pool.demand import FailureRecord, MachineFailure
from everstep.decisions.pool.size import PAPER_RATE, FailureRate, failure_rate


def seen(failures: int, *, machines: int = 400, days: float = 349.0) -> FailureRecord:
    return FailureRecord(machines, days, tuple(MachineFailure(f"m{n % machines}", 0.5) for n in range(failures)))


@pytest.mark.parametrize("record", [None, FailureRecord(4, 0.0), FailureRecord(0, 9.0)])
def test_without_a_record_it_is_the_papers(record: FailureRecord | None) -> None:
    assert failure_rate(record) == FailureRate(PAPER_RATE, "paper")


def test_a_long_record_replaces_the_papers() -> None:
    found = failure_rate(seen(584))
    assert found.per_day == pytest.approx(584 / (400 * 349), rel=0.01)
    assert (found.source, found.failures, found.machine_days) == ("record", 584, 400 * 349)


def test_a_short_record_without_a_failure_does_not_say_that_none_fails() -> None:
    assert failure_rate(seen(0, machines=4, days=2)).per_day == pytest.approx(PAPER_RATE, rel=0.01)
    assert failure_rate(seen(0)).per_day < PAPER_RATE / 100


@given(st.integers(0, 50), st.integers(1, 100), st.floats(0.1, 100))
def test_more_failures_raise_it_and_it_stays_a_probability(failures: int, machines: int, days: float) -> None:
    fewer = failure_rate(seen(failures, machines=machines, days=days)).per_day
    more = failure_rate(seen(failures + 1, machines=machines, days=days)).per_day
    assert 0 < fewer <= more <= 1
