"""Computes the effective training time ratio (ETTR) of a job: productive time over wall time.

ByteRobust (section 4.2) reports it for the complete job and for a sliding window of one hour. MegaScale calls it the
effective training time rate.

The time of a job that has stepped is productive until the last step before an incident. If no rank steps and no
incident is open yet, the time is productive until the last step that agents reported. A pause that ends with a step is
productive too, e.g. an evaluation. The function ``unproductive`` returns the times that are not productive. The ledger
has further unproductive times, such as lost steps. If intervals overlap, each moment counts once, for the gravest kind.
A kind that only a later release knows counts as a recovery.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, TypeVar, get_args

K = TypeVar("K", bound=str)


def time_by_kind(
    spans: Iterable[tuple[int, int | None, K]], kinds: Sequence[K], *, begin_ns: int, end_ns: int
) -> dict[K, int]:
    """Split a period into the time of each kind, nanoseconds; the sum is the length of the period.

    Args:
        spans: The beginning, the end (None: it has not ended) and the kind of each span, in any order. A span may reach
            beyond the period.
        kinds: The kinds from the least grave to the gravest. The first kind is the kind of time without a span.
        begin_ns: The beginning of the period.
        end_ns: The end of the period, not before its beginning.
    """
    spent = dict.fromkeys(kinds, 0)
    changes: list[tuple[int, int, K]] = []
    for start_ns, stop_ns, kind in spans:
        first = max(start_ns, begin_ns)
        last = end_ns if stop_ns is None else min(stop_ns, end_ns)
        if first < last:
            changes += [(first, 1, kind), (last, -1, kind)]
    open_now = dict.fromkeys(kinds, 0)
    at = begin_ns
    for time_ns, change, kind in [*sorted(changes), (end_ns, 0, kinds[0])]:
        gravest = next((kind for kind in reversed(kinds) if open_now[kind]), kinds[0])
        spent[gravest] += time_ns - at
        open_now[kind] += change
        at = time_ns
    return spent


Kind = Literal["productive", "lost steps", "launch", "recovery", "parked"]
KINDS: tuple[Kind, ...] = get_args(Kind)
"""The kinds of time, from the least grave to the gravest: if intervals overlap, the gravest kind counts."""
UNKNOWN: Kind = "recovery"

START = "start"
"""The cause of the time before the first step of a job."""
QUIET = "no rank steps"
"""The cause of the time in which no rank steps and no incident is open yet."""

WINDOW_S = 3600.0
"""The sliding window, seconds (ByteRobust, section 4.2)."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A part of a job's time, and its kind; ``end_ns`` is None if it has not ended."""

    start_ns: int
    end_ns: int | None
    kind: Kind
    cause: str = ""


@dataclass(frozen=True, slots=True)
class Launch:
    """A generation that was launched."""

    launched_ns: int
    stepped_ns: int | None = None
    """When all ranks had stepped, or counted as running without steps; None: that was never seen."""


@dataclass(frozen=True, slots=True)
class Outage:
    """The time of an incident, as far as it is known."""

    cause: str
    start_ns: int
    """The time of the last step that was seen before the incident, or when its fault was seen."""
    closed_ns: int | None = None
    """The end of the incident; None: it is open, or its end was not recorded."""


@dataclass(frozen=True, slots=True)
class Ettr:
    """The wall time of a job by kind; ``seconds`` has every kind and sums up to ``wall_s``."""

    wall_s: float
    seconds: dict[Kind, float]
    unknown: tuple[str, ...] = ()
    """Further losses of productive time whose length is not known; with them the ratio is an upper bound."""

    @property
    def ratio(self) -> float | None:
        """Productive time over wall time, 0 to 1; None: no time has passed, or no time is known to be productive."""
        if self.wall_s <= 0 or (self.unknown and not self.seconds["productive"]):
            return None
        return self.seconds["productive"] / self.wall_s


def unproductive(started_ns: int, launches: Iterable[Launch], outages: Iterable[Outage]) -> list[Interval]:
    """Return the intervals in which a job did not step: from its start, each launch and each incident to the next step.

    An interval ends at the latest with a step of a later generation, so an incident whose end was not recorded does not
    make all later time unproductive. A job without any step has no productive time.

    Args:
        started_ns: The start of the job.
        launches: All generations.
        outages: All incidents.
    """
    generations = list(launches)
    # Sorted by the time until which both the launch and the step of a generation are later.
    steps = sorted((min(one.launched_ns, one.stepped_ns), one.stepped_ns) for one in generations if one.stepped_ns)
    first_from = [*accumulate((stepped_ns for _, stepped_ns in reversed(steps)), min)][::-1]
    """The first of these steps, from each place in the list to its end."""

    def stepped_after(begin_ns: int, *ends_ns: int | None) -> int | None:
        """Return the first step of a generation that was launched at ``begin_ns`` or later, or the first of ``ends_ns``
        if that is earlier."""
        place = bisect_left(steps, (begin_ns,))
        ends = [time_ns for time_ns in ends_ns if time_ns and time_ns >= begin_ns]
        return min([*first_from[place : place + 1], *ends], default=None)

    return [
        Interval(started_ns, first_from[0] if first_from else None, "launch", START),
        *(Interval(g.launched_ns, stepped_after(g.launched_ns), "launch", "a launch") for g in generations),
        *(Interval(o.start_ns, stepped_after(o.start_ns, o.closed_ns), "recovery", o.cause) for o in outages),
    ]


def ettr(
    intervals: Iterable[Interval],
    *,
    start_ns: int,
    now_ns: int,
    window_s: float | None = None,
    unknown: Sequence[str] = (),
) -> Ettr:
    """Split the wall time of a job by kind.

    Args:
        intervals: The times that are not productive, in any order; they may overlap, and reach beyond the job's time.
        start_ns: The start of the job.
        now_ns: The current time, or the end of the job.
        window_s: The length of a sliding window that ends at ``now_ns``; None: the time since the start.
        unknown: Further losses of productive time whose length is not known, as text.
    """
    begin = start_ns if window_s is None else max(start_ns, now_ns - round(window_s * 1e9))
    end = max(begin, now_ns)
    spans = (
        (interval.start_ns, interval.end_ns, interval.kind if interval.kind in KINDS else UNKNOWN)
        for interval in intervals
    )
    spent = time_by_kind(spans, KINDS, begin_ns=begin, end_ns=end)
    seconds = {kind: ns / 1e9 for kind, ns in spent.items()}
    return Ettr(wall_s=(end - begin) / 1e9, seconds=seconds, unknown=tuple(unknown))
