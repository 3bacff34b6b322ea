"""The number of standbys in use on each day. It must equal a count at single moments."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from everstep.decisions.pool.demand import (
    AGAIN_DAYS,
    DAY_NS,
    FailureRecord,
    MachineFailure,
    Refill,
    daily_demand,
    record_from,
)

PARTS = 4
"""The number of parts of a day. Failures begin and end at quarters of days."""
DAYS = 30


@st.composite
def machine_failures(draw: st.DrawFn) -> MachineFailure:
    begin = draw(st.integers(0, DAYS * PARTS - 1))
    took = draw(st.none() | st.integers(1, 60))
    back = None if took is None else (begin + took) / PARTS
    return MachineFailure(draw(st.sampled_from("abcde")), begin / PARTS, back)


RECORDS = st.builds(
    lambda failures: FailureRecord(5, DAYS + 0.5, tuple(failures)), st.lists(machine_failures(), max_size=12)
)


def counted(record: FailureRecord) -> list[int]:
    """Return for each day the largest number of machines that are away, as counted at the start of each quarter."""

    def away(machine: str, moment: float) -> bool:
        own = [failure for failure in record.failures if failure.machine == machine]
        before = [failure for failure in own if failure.failed_day <= moment]
        if any(failure.back_day is None or moment < failure.back_day for failure in before):
            return True
        last = max((failure.back_day or 0 for failure in before), default=None)
        following = [failure.failed_day for failure in own if failure.failed_day > moment]
        return last is not None and bool(following) and min(following) - last <= AGAIN_DAYS

    moments = [[day + part / PARTS for part in range(PARTS)] for day in range(DAYS)]
    return [max(sum(away(machine, moment) for machine in "abcde") for moment in day) for day in moments]


@given(RECORDS)
def test_the_demand_equals_a_count_at_single_moments(record: FailureRecord) -> None:
    assert daily_demand(record, Refill.REPAIR) == counted(record)


@given(RECORDS, st.integers(0, DAYS))
def test_a_record_before_a_day_has_no_facts_of_that_day(record: FailureRecord, day: int) -> None:
    known = record.before(day)
    assert known.days == day
    assert all(failure.failed_day < day and (failure.back_day or 0) < day for failure in known.failures)
    assert daily_demand(known, Refill.DAILY) == daily_demand(record, Refill.DAILY)[:day]
    earlier = daily_demand(known, Refill.REPAIR)
    assert all(had <= has for had, has in zip(earlier, daily_demand(record, Refill.REPAIR), strict=False))


def test_a_machine_that_fails_again_soon_was_away_in_between() -> None:
    soon = (MachineFailure("a", 1.0, 2.0), MachineFailure("a", 2.0 + AGAIN_DAYS, 9.5))
    late = (MachineFailure("a", 1.0, 2.0), MachineFailure("a", 2.5 + AGAIN_DAYS, 9.9))
    assert daily_demand(FailureRecord(2, 11, soon), Refill.REPAIR) == [0] + [1] * 9 + [0]
    assert daily_demand(FailureRecord(2, 11, late), Refill.REPAIR) == [0, 1, 0, 0, 0, 0, 0, 0, 0, 1, 0]


def test_the_demand_of_a_pool_that_is_refilled_daily_is_the_failures_of_a_day() -> None:
    failures = (MachineFailure("a", 0.1), MachineFailure("b", 0.9), MachineFailure("c", 2.0))
    assert daily_demand(FailureRecord(3, 3.9, failures), Refill.DAILY) == [2, 0, 1]
    assert daily_demand(FailureRecord(3, 3.9, failures), Refill.REPAIR) == [2, 2, 3]


START = 1_763_730_000 * 10**9


def at(day: float) -> int:
    return START + round(day * DAY_NS)


def test_a_machine_is_back_when_a_job_has_it_again() -> None:
    record = record_from(
        [("m2", at(1)), ("m1", at(3))],
        [("m2", at(0.5)), ("m2", at(1)), ("m2", at(4)), ("m1", at(2))],
        machines=8,
        start_ns=START,
        until_ns=at(10),
    )
    assert (record.machines, record.days) == (8, 10.0)
    assert [(one.machine, one.failed_day, one.back_day) for one in record.failures] == [
        ("m2", 1.0, 4.0),
        ("m1", 3.0, None),
    ]
    assert daily_demand(record, Refill.REPAIR) == [0, 1, 1, 2, 1, 1, 1, 1, 1, 1]


def test_failures_outside_the_period_do_not_count() -> None:
    record = record_from([("m1", at(-1)), ("m1", at(11))], [], machines=8, start_ns=START, until_ns=at(10))
    assert record.failures == ()
    assert record_from([], [], machines=8, start_ns=START, until_ns=at(-1)).days == 0.0
