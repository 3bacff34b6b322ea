"""The record of failures that evictions make."""

from __future__ import annotations

from everstep.decisions.pool.demand import DAY_NS, Refill, daily_demand, record_from

START = 1_763_730_000 * 10**9


def at(day: float) -> int:
    return START + round(day * DAY_NS)


def test_a_machine_is_back_when_it_was_seen_in_a_job_again() -> None:
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


def test_what_is_not_of_the_time_does_not_count() -> None:
    record = record_from([("m1", at(-1)), ("m1", at(11))], [], machines=8, start_ns=START, until_ns=at(10))
    assert record.failures == ()
    assert record_from([], [], machines=8, start_ns=START, until_ns=at(-1)).days == 0.0
