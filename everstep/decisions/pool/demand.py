"""Computes the number of standbys that past failures would have needed on each day.

Days are counted from the beginning of the record, and only complete days count. In a record that is made from evictions
a machine counts as repaired once a job has it again, which is later than its repair.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

DAY_NS = 86_400 * 10**9

MachineTime = tuple[str, int]
"""A machine and a time, nanoseconds of the wall clock."""


def record_from(
    evicted: Iterable[MachineTime], seen: Iterable[MachineTime], *, machines: int, start_ns: int, until_ns: int
) -> FailureRecord:
    """Make the record of a cluster from the evictions of its jobs.

    Args:
        evicted: Machines that left a job, and when.
        seen: Machines that were in a job, and when.
        machines: The number of machines that could fail.
        start_ns: The beginning of the record.
        until_ns: The end of the record.
    """
    in_a_job: dict[str, list[int]] = defaultdict(list)
    for machine, time_ns in sorted(seen, key=lambda machine_time: machine_time[1]):
        in_a_job[machine].append(time_ns)

    def day(time_ns: int) -> float:
        return (time_ns - start_ns) / DAY_NS

    def back_day(machine: str, failed_ns: int) -> float | None:
        times = in_a_job[machine]
        later = bisect_right(times, failed_ns)
        return day(times[later]) if later < len(times) else None

    failures = [
        MachineFailure(machine, day(failed_ns), back_day(machine, failed_ns))
        for machine, failed_ns in sorted(evicted, key=lambda machine_time: machine_time[::-1])
        if start_ns <= failed_ns <= until_ns
    ]
    return FailureRecord(machines, max(0.0, day(until_ns)), tuple(failures))


AGAIN_DAYS = 7.0
"""A machine that fails again within this many days was not repaired, and counts as away in between. In the trace of
InfiniteHBD 34 % of the repaired machines fail again so soon."""


class Refill(StrEnum):
    """The source of the machines that refill the pool."""

    REPAIR = "repair"
    """Only repair: a standby is in use until the machine that it replaces is repaired."""
    DAILY = "daily"
    """Other machines: the pool is full again every day, however long repairs last. ByteRobust (table 5) assumes this,
    since it uses a quantile of the failures of one day."""


@dataclass(frozen=True, slots=True)
class MachineFailure:
    """A failure of a machine because of which a job lost the machine."""

    machine: str
    failed_day: float
    """When the machine failed, days after the beginning of the record."""
    back_day: float | None = None
    """When the machine could be used again, days after the beginning of the record; None: not yet."""


@dataclass(frozen=True, slots=True)
class FailureRecord:
    """The failures of a cluster over some time."""

    machines: int
    """The number of machines that could fail."""
    days: float
    """The length of the record, days."""
    failures: tuple[MachineFailure, ...] = ()

    def before(self, day: float) -> FailureRecord:
        """Return the part of the record that was known at the beginning of a day."""
        known = (
            failure if failure.back_day is None or failure.back_day < day else replace(failure, back_day=None)
            for failure in self.failures
            if failure.failed_day < day
        )
        return replace(self, days=min(self.days, day), failures=tuple(known))


def daily_demand(record: FailureRecord, refill: Refill) -> list[int]:
    """Return the largest number of standbys in use at once, for each day of a record.

    Args:
        record: The failures, and when each machine could be used again.
        refill: The source of the machines that refill the pool.
    """
    days = int(record.days)
    if refill is Refill.DAILY:
        failed = Counter(int(failure.failed_day) for failure in record.failures)
        return [failed[day] for day in range(days)]
    return list(_away_at_once(list(_absences(record)), days))


def _absences(record: FailureRecord) -> Iterator[tuple[float, float]]:
    """Return the beginning and end of each absence of a machine; absences of one machine do not overlap."""
    of_machine: dict[str, list[MachineFailure]] = defaultdict(list)
    for failure in sorted(record.failures, key=lambda failure: failure.failed_day):
        of_machine[failure.machine].append(failure)
    for failures in of_machine.values():
        begin, end = failures[0].failed_day, _back(failures[0])
        for failure in failures[1:]:
            if failure.failed_day > end + AGAIN_DAYS:
                yield begin, end
                begin = failure.failed_day
            end = max(end, _back(failure))
        yield begin, end


def _back(failure: MachineFailure) -> float:
    return float("inf") if failure.back_day is None else max(failure.back_day, failure.failed_day)


def _away_at_once(absences: list[tuple[float, float]], days: int) -> Iterator[int]:
    """Return the largest number of simultaneous absences on each day. An absence does not overlap with another one that
    begins when it ends."""
    changes = deque(sorted(change for begin, end in absences for change in ((begin, 1), (end, -1))))
    away = 0
    for day in range(days):
        while changes and changes[0][0] <= day:
            away += changes.popleft()[1]
        most = away
        while changes and changes[0][0] < day + 1:
            away += changes.popleft()[1]
            most = max(most, away)
        yield most
