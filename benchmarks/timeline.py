"""The parts of a recovery's time, one after the other, from the fault to the next step of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

UNACCOUNTED = "unaccounted"
PARTS = (
    "detect",
    "report",
    "stop",
    "decide",
    "launch",
    "start",
    "import",
    "rendezvous",
    "restore",
    "next step",
)
"""The parts in order. Each part ends with an event:

- detect: the agent detects the fault;
- report: the incident schedules its first activity;
- stop: that activity is over;
- decide: the launch is scheduled;
- launch: the last rank is forked.

The other parts end with an event of the slowest rank:

- start: it has started its script;
- import: it has joined the job;
- rendezvous: it has its groups and model;
- restore: it has restored its state;
- next step: it has completed and saved the step."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """A recovery from one fault."""

    rank: int
    at_step: int
    seconds: float
    """Time from the fault to the next step that all ranks completed."""
    parts: dict[str, float] = field(default_factory=dict)


def parts_between(total_s: float, begin_ns: int, marks: Sequence[tuple[str, int]]) -> dict[str, float]:
    """Part → seconds. The part ``unaccounted`` has the rest, so that the sum is the total.

    Args:
        total_s: The complete time, seconds.
        begin_ns: Time of the fault, nanoseconds.
        marks: Name of each part in order, and its end, nanoseconds; 0: the end is not known, so the next part gets its
            time.
    """
    parts: dict[str, float] = {}
    before = begin_ns
    for name, end_ns in marks:
        parts[name] = 0.0
        if end_ns:
            parts[name] = (end_ns - before) / 1e9
            before = end_ns
    parts[UNACCOUNTED] = total_s - sum(parts.values())
    return parts
