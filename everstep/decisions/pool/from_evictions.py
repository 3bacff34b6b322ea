"""The failures of a cluster, from the machines that left its jobs.

A machine that was evicted counts as back once it was seen in a job again. When that
was is known no better than this, so it counts as away for longer than it was.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable

from everstep.decisions.pool.demand import FailureRecord, MachineFailure

DAY_NS = 86_400 * 10**9

MachineTime = tuple[str, int]
"""A machine, and when something was seen of it, nanoseconds of the wall clock."""


def record_from(
    evicted: Iterable[MachineTime], seen: Iterable[MachineTime], *, machines: int, start_ns: int, until_ns: int
) -> FailureRecord:
    """The record of a cluster.

    Args:
        evicted: Machines that left a job, and when.
        seen: Machines that were in a job, and when.
        machines: That could fail.
        start_ns: Since when failures would have been seen.
        until_ns: Until when.
    """
    in_a_job: dict[str, list[int]] = defaultdict(list)
    for machine, time_ns in sorted(seen, key=lambda one: one[1]):
        in_a_job[machine].append(time_ns)

    def day(time_ns: int) -> float:
        return (time_ns - start_ns) / DAY_NS

    def back_day(machine: str, failed_ns: int) -> float | None:
        times = in_a_job[machine]
        later = bisect_right(times, failed_ns)
        return day(times[later]) if later < len(times) else None

    failures = [
        MachineFailure(machine, day(failed_ns), back_day(machine, failed_ns))
        for machine, failed_ns in sorted(evicted, key=lambda one: (one[1], one[0]))
        if start_ns <= failed_ns <= until_ns
    ]
    return FailureRecord(machines, max(0.0, day(until_ns)), tuple(failures))
