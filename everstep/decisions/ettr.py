"""Effective training time ratio: productive time over wall time.

ByteRobust section 4.2 reports it cumulatively and over a sliding window of one
hour; MegaScale calls the same ratio the effective training time rate.

A job that runs is taken to step, so time that no interval covers counts as
productive; whoever records intervals must record what was *not* productive.
Where intervals overlap each moment counts once, for the gravest kind. A kind that a
newer release noted counts as a recovery.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal["productive", "lost steps", "launch", "recovery", "parked"]
KINDS: tuple[Kind, ...] = get_args(Kind)
"""From the least to the gravest: the gravest wins where two overlap (ours)."""
UNKNOWN: Kind = "recovery"

WINDOW_S = 3600.0
"""The sliding window, seconds (ByteRobust, section 4.2)."""


@dataclass(frozen=True, slots=True)
class Interval:
    """How a job spent the time from ``start_ns`` to ``end_ns`` (None: still going on)."""

    start_ns: int
    end_ns: int | None
    kind: Kind
    cause: str = ""


@dataclass(frozen=True, slots=True)
class Ettr:
    """Where the wall time of a job went; ``seconds`` has every kind and sums up to ``wall_s``."""

    wall_s: float
    seconds: dict[Kind, float]

    @property
    def ratio(self) -> float | None:
        """Productive over wall time, 0 to 1; None when no time has passed."""
        return self.seconds["productive"] / self.wall_s if self.wall_s > 0 else None


def ettr(intervals: Iterable[Interval], *, start_ns: int, now_ns: int, window_s: float | None = None) -> Ettr:
    """Split the wall time of a job by kind.

    Args:
        intervals: in any order; they may overlap and may reach beyond the job's time.
        start_ns: start of the job.
        now_ns: the present, or the end of the job.
        window_s: length of a sliding window that ends at ``now_ns``; None: since the start.
    """
    begin = start_ns if window_s is None else max(start_ns, now_ns - round(window_s * 1e9))
    end = max(begin, now_ns)
    spent = dict.fromkeys(KINDS, 0)
    changes: list[tuple[int, int, Kind]] = []
    for interval in intervals:
        first = max(interval.start_ns, begin)
        last = end if interval.end_ns is None else min(interval.end_ns, end)
        if first < last:
            kind = interval.kind if interval.kind in KINDS else UNKNOWN
            changes += [(first, 1, kind), (last, -1, kind)]
    open_now = dict.fromkeys(KINDS, 0)
    at = begin
    for time_ns, change, kind in [*sorted(changes), (end, 0, KINDS[0])]:
        spent[_gravest(open_now)] += time_ns - at
        open_now[kind] += change
        at = time_ns
    return Ettr(wall_s=(end - begin) / 1e9, seconds={kind: ns / 1e9 for kind, ns in spent.items()})


def _gravest(open_now: dict[Kind, int]) -> Kind:
    return next((kind for kind in reversed(KINDS) if open_now[kind]), KINDS[0])
