"""Effective training time ratio: productive time over wall time.

ByteRobust section 4.2 reports it cumulatively and over a sliding window of one
hour; MegaScale calls the same ratio the effective training time rate.

A job that has stepped is taken to go on stepping until the last step before an incident, or
until the last step that its agents tell of, where the incident of a hang is yet to be opened.
When it steps again before that, the time between counts as productive: it may have evaluated.
What was *not* productive is what ``unproductive`` says, and what was noted besides. Where intervals overlap each moment
counts once, for the gravest kind. A kind that a newer release noted counts as a recovery.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar, get_args

K = TypeVar("K", bound=str)


def time_by_kind(
    spans: Iterable[tuple[int, int | None, K]], kinds: Sequence[K], *, begin_ns: int, end_ns: int
) -> dict[K, int]:
    """Nanoseconds of each kind; together they are all of the time.

    Args:
        spans: Begin, end (None: still going on) and kind, in any order; they may reach beyond the time.
        kinds: From the least to the gravest; the first one is what nothing covers.
        begin_ns: Of the time.
        end_ns: Of the time, not before its begin.
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
"""From the least to the gravest: the gravest wins where two overlap."""
UNKNOWN: Kind = "recovery"

START = "start"
"""Cause of the time before the first step of a job."""
QUIET = "no rank steps"
"""Cause of the time in which no rank steps and no incident is open yet."""

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
class Launch:
    """A generation that was launched."""

    launched_ns: int
    stepped_ns: int | None = None
    """When all its ranks had stepped, or counted as alive where steps do not show; None: that was never seen."""


@dataclass(frozen=True, slots=True)
class Outage:
    """An incident, as far as it is known."""

    cause: str
    start_ns: int
    """The last step that was seen before it, or when it was seen."""
    closed_ns: int | None = None
    """None: it is open, or its end was never noted."""


@dataclass(frozen=True, slots=True)
class Ettr:
    """Where the wall time of a job went; ``seconds`` has every kind and sums up to ``wall_s``."""

    wall_s: float
    seconds: dict[Kind, float]
    unknown: tuple[str, ...] = ()
    """What may have cost productive time and is not known: the ratio is that much at most."""

    @property
    def ratio(self) -> float | None:
        """Productive over wall time, 0 to 1; None: no time has passed, or whether any was productive is not known."""
        if self.wall_s <= 0 or (self.unknown and not self.seconds["productive"]):
            return None
        return self.seconds["productive"] / self.wall_s


def unproductive(started_ns: int, launches: Iterable[Launch], outages: Iterable[Outage]) -> list[Interval]:
    """When a job did not step: before its first step, from each launch and from each incident to the next step.

    No interval outlives a step that was seen after its begin: who forgot to note the end of one
    does not make the time after it unproductive. Without any step nothing was productive.

    Args:
        started_ns: Start of the job.
        launches: All generations.
        outages: All incidents.
    """
    generations = list(launches)

    def stepped_after(begin_ns: int, *ends_ns: int | None) -> int | None:
        """When a generation that was launched since had stepped, or one of ``ends_ns``, whichever is first."""
        steps_ns = [launch.stepped_ns for launch in generations if launch.launched_ns >= begin_ns]
        return min((time_ns for time_ns in (*steps_ns, *ends_ns) if time_ns and time_ns >= begin_ns), default=None)

    first = min((launch.stepped_ns for launch in generations if launch.stepped_ns), default=None)
    return [
        Interval(started_ns, first, "launch", START),
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
        intervals: in any order; they may overlap and may reach beyond the job's time.
        start_ns: start of the job.
        now_ns: the present, or the end of the job.
        window_s: length of a sliding window that ends at ``now_ns``; None: since the start.
        unknown: what may have cost productive time beside the intervals, in words.
    """
    begin = start_ns if window_s is None else max(start_ns, now_ns - round(window_s * 1e9))
    end = max(begin, now_ns)
    known = (
        (interval.start_ns, interval.end_ns, interval.kind if interval.kind in KINDS else UNKNOWN)
        for interval in intervals
    )
    spent = time_by_kind(known, KINDS, begin_ns=begin, end_ns=end)
    seconds = {kind: ns / 1e9 for kind, ns in spent.items()}
    return Ettr(wall_s=(end - begin) / 1e9, seconds=seconds, unknown=tuple(unknown))
