"""Splits the lost time of a job by cause: detection, decisions, evictions, restarts, lost steps, and others.

ByteRobust (section 4.2) counts as unproductive the time in which a fault is detected, the next action is decided,
machines are replaced, the job is restarted, or lost steps are computed again. The sum of the causes is exactly the
time that ``everstep.decisions.training_time.ettr`` counts as not productive. If causes overlap, each moment counts
once, for the gravest cause.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from everstep.decisions.training_time.ettr import QUIET, START, Interval, time_by_kind
from everstep.model.stage import Stage

Cause = Literal["productive", "recompute", "unknown", "restart", "start", "detect", "decide", "evict", "parked"]
CAUSES: tuple[Cause, ...] = get_args(Cause)
"""The causes from the least grave to the gravest. ``start`` is the time before the first step of a job."""

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
"""Stage of an incident → the cause of the time in it."""


@dataclass(frozen=True, slots=True)
class IncidentTimes:
    """The known times of an incident."""

    opened_ns: int | None
    """When the incident was opened; None: not known."""
    stages: tuple[tuple[str, float], ...] = ()
    """The stages in its report, with their seconds; empty: it is open, or has no report."""
    parked: tuple[tuple[int, int], ...] = ()
    """The beginning and end of each time that the job was parked, in order."""
    noted: tuple[tuple[str, int], ...] = ()
    """The stages of its notes in the ledger, with the time of each note, in order. A note is made at a stage's end."""
    parked_now: bool | None = None
    """Whether an open incident is parked; None: not known."""


Span = tuple[int, int | None, Cause]
"""Begin, end (None: it has not ended) and cause."""


def time_lost(
    intervals: Iterable[Interval], incidents: Mapping[str, IncidentTimes], *, begin_ns: int, end_ns: int
) -> dict[Cause, float]:
    """Split a period of a job into the time of each cause, seconds, with the productive time.

    Args:
        intervals: The times that are not productive, as for the ETTR.
        incidents: Cause in the intervals of an incident → the times of the incident.
        begin_ns: The beginning of the period.
        end_ns: The end of the period: the current time, or the end of the job.
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
    """Return the time of an incident by cause; the cause of time in no span is not known.

    Args:
        begin_ns: The time of the last step before the incident.
        end_ns: The time of the first step after the incident, or of its end; None: it is open.
        times: The known times of the incident.
    """
    if times.opened_ns is None:
        return []
    detect: Span = (begin_ns, times.opened_ns, "detect")
    if times.stages and end_ns is not None:
        return [detect, *_of_stages(times.opened_ns, end_ns, times)]
    return [detect, *_of_notes(times.opened_ns, end_ns, times)]


def _of_stages(opened_ns: int, end_ns: int, times: IncidentTimes) -> Iterator[Span]:
    """Return the spans of the stages in a report.

    The beginning and end are known only for stages in which the job was parked. For other stages only the duration is
    known.
    """
    parked = iter(times.parked)
    at_ns = opened_ns
    before: list[tuple[str, float]] = []
    for name, seconds in times.stages:
        period = next(parked, None) if name == Stage.PARKED else None
        if period is None:
            before.append((name, seconds))
            continue
        yield from _in_sequence(before, at_ns, period[0], "decide")
        yield *period, "parked"
        at_ns, before = period[1], []
    yield from _in_sequence(before, at_ns, end_ns, None)


def _in_sequence(stages: Sequence[tuple[str, float]], begin_ns: int, end_ns: int, rest: Cause | None) -> Iterator[Span]:
    """Return the spans of stages one after the other, between two times.

    If the stages do not fill the time, the rest was a wait before the last reattempt, and is added to that stage.
    Without a reattempt the rest is at the end, with the cause ``rest``; if ``rest`` is None, it has no cause.
    """
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
    """Return the spans of an incident without a report, each from one note to the next."""
    at_ns, last = opened_ns, ""
    for stage, time_ns in times.noted:
        cause = OF_STAGE.get(stage, "unknown")
        # A stop after a decision or a restore follows a restart that failed.
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
