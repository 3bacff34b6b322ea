"""Which part of an incident cost a job how much of its productive time.

ByteRobust (section 4.2) counts as unproductive what it takes to detect a fault, to find out what to do, to replace
machines, to restart and to compute lost steps again. The causes together are exactly what
``everstep.decisions.training_time.ettr``
counts as not productive; where they overlap each moment counts once, for the gravest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from everstep.decisions.training_time.ettr import QUIET, START, Interval, time_by_kind
from everstep.model.stage import Stage

Cause = Literal["productive", "recompute", "unknown", "restart", "start", "detect", "decide", "evict", "parked"]
CAUSES: tuple[Cause, ...] = get_args(Cause)
"""From the least to the gravest. ``start`` is the time before the first step of a job."""

OF_STAGE: dict[str, Cause] = {
    Stage.ALIGN: "restart",
    Stage.VOTE: "decide",
    Stage.TRACE: "decide",
    Stage.STOP: "decide",
    Stage.FIND: "decide",
    Stage.DECIDE: "decide",
    Stage.DIAGNOSE: "decide",
    Stage.ACCEPTED: "decide",
    Stage.EVICT: "evict",
    Stage.RESTORE: "restart",
    Stage.BACKOFF: "restart",
    Stage.REATTEMPT: "restart",
    Stage.CONFIRM: "restart",
    Stage.PARKED: "parked",
}
"""What the time in a stage counts as: until it is known what to do, to decide."""


@dataclass(frozen=True, slots=True)
class IncidentTimes:
    """What is known of where the time of an incident went."""

    opened_ns: int | None
    """None: not known."""
    stages: tuple[tuple[str, float], ...] = ()
    """Name and seconds, as the report has them; empty: it is open, or has no report."""
    parked: tuple[tuple[int, int], ...] = ()
    """Begin and end of each time that the job was parked, in order."""
    noted: tuple[tuple[str, int], ...] = ()
    """Stages at whose end something was written down, and when, in order."""
    parked_now: bool | None = None
    """Whether an open incident is parked; None: not known."""


Span = tuple[int, int | None, Cause]
"""Begin, end (None: still going on) and cause."""


def time_lost(
    intervals: Iterable[Interval], incidents: Mapping[str, IncidentTimes], *, begin_ns: int, end_ns: int
) -> dict[Cause, float]:
    """Seconds of a job by cause, productive ones too; together they are all of the time.

    Args:
        intervals: How the job spent its time, as for its ETTR.
        incidents: By the cause that their intervals name.
        begin_ns: Of the time.
        end_ns: Of the time: the present, or the end of the job.
    """
    spans = [span for interval in intervals for span in _spans(interval, incidents)]
    spent = time_by_kind(spans, CAUSES, begin_ns=begin_ns, end_ns=max(begin_ns, end_ns))
    return {cause: ns / 1e9 for cause, ns in spent.items()}


def _spans(interval: Interval, incidents: Mapping[str, IncidentTimes]) -> Iterator[Span]:
    begin_ns, end_ns = interval.start_ns, interval.end_ns
    match interval.kind:
        case "productive":
            return
        case "lost steps":
            yield begin_ns, end_ns, "recompute"
        case "launch":
            yield begin_ns, end_ns, "start" if interval.cause == START else "restart"
        case "parked":
            yield begin_ns, end_ns, "parked"
        case _ if interval.cause == QUIET:
            yield begin_ns, end_ns, "detect"
        case _:
            yield begin_ns, end_ns, "unknown"
            if times := incidents.get(interval.cause):
                yield from _within(begin_ns, end_ns, incident_spans(begin_ns, end_ns, times))


def _within(begin_ns: int, end_ns: int | None, spans: Iterable[Span]) -> Iterator[Span]:
    for first, last, cause in spans:
        end = last if end_ns is None else end_ns if last is None else min(last, end_ns)
        if end is None or end > max(first, begin_ns):
            yield max(first, begin_ns), end, cause


def incident_spans(begin_ns: int, end_ns: int | None, times: IncidentTimes) -> list[Span]:
    """Where the time of an incident went; what is in no span is not known.

    Args:
        begin_ns: The last step that was seen before it.
        end_ns: The first step after it, or its end; None: it is open.
        times: What is known of it.
    """
    if times.opened_ns is None:
        return []
    detect: Span = (begin_ns, times.opened_ns, "detect")
    if times.stages and end_ns is not None:
        return [detect, *_of_stages(times.opened_ns, end_ns, times)]
    return [detect, *_of_notes(times.opened_ns, end_ns, times)]


def _of_stages(opened_ns: int, end_ns: int, times: IncidentTimes) -> Iterator[Span]:
    """Stages in their order; of those in which the job was parked begin and end are known, of others how long."""
    parked = iter(times.parked)
    at_ns = opened_ns
    before: list[tuple[str, float]] = []
    for name, seconds in times.stages:
        known = next(parked, None) if name == Stage.PARKED else None
        if known is None:
            before.append((name, seconds))
            continue
        yield from _laid_out(before, at_ns, known[0], "decide")
        yield *known, "parked"
        at_ns, before = known[1], []
    yield from _laid_out(before, at_ns, end_ns, None)


def _laid_out(stages: Sequence[tuple[str, float]], begin_ns: int, end_ns: int, rest: Cause | None) -> Iterator[Span]:
    """One after the other. What they leave was waited before the last try to restart; without a try it counts
    as ``rest``, at the end."""
    left_ns = end_ns - begin_ns - sum(round(seconds * 1e9) for _, seconds in stages)
    last_try = max((index for index, (name, _) in enumerate(stages) if name == Stage.REATTEMPT), default=None)
    at_ns = begin_ns
    for index, (name, seconds) in enumerate(stages):
        until_ns = at_ns + round(seconds * 1e9) + (left_ns if index == last_try and left_ns > 0 else 0)
        yield at_ns, until_ns, OF_STAGE.get(name, "unknown")
        at_ns = until_ns
    if rest is not None and at_ns < end_ns:
        yield at_ns, end_ns, rest


def _of_notes(opened_ns: int, end_ns: int | None, times: IncidentTimes) -> Iterator[Span]:
    """The stages of an incident without a report: from one note to the next."""
    at_ns, last = opened_ns, ""
    for stage, time_ns in times.noted:
        cause = OF_STAGE.get(stage, "unknown")
        # After a decision the next stop comes from a try to restart that failed.
        yield at_ns, time_ns, "restart" if cause == "decide" and last in {Stage.DECIDE, Stage.RESTORE} else cause
        at_ns, last = time_ns, stage
    if end_ns is not None:
        return
    if times.parked_now:
        yield at_ns, None, "parked"
    elif last not in {Stage.DECIDE, Stage.RESTORE, Stage.PARKED}:
        yield at_ns, None, "decide"
    elif times.parked_now is False:
        yield at_ns, None, "restart"
