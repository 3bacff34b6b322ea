"""Where the time of one recovery went: contiguous parts from the fault to the next step of all ranks."""

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
"""In order. detect: fault to the agent's notice; report: to the incident's first activity scheduled; stop: until
that activity is over; decide: to the launch scheduled; launch: to the last fork. The others end when the slowest rank
is there: start: in its script; import: joined; rendezvous: groups and model made; restore: state restored; next
step: completed and saved."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """One fault and what followed."""

    rank: int
    at_step: int
    seconds: float
    """Fault to the next step completed by all ranks at full width."""
    parts: dict[str, float] = field(default_factory=dict)


def parts_between(total_s: float, begin_ns: int, marks: Sequence[tuple[str, int]]) -> dict[str, float]:
    """Seconds by part, with what is left of the total as ``unaccounted``: they sum up to the total.

    Args:
        total_s: What was measured from end to end.
        begin_ns: The fault.
        marks: Name and end of each part, in order; 0: this end is not known, its time goes to the next part.
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
