"""Finds the first cause of a failure, in the logs of all ranks or in the output of one rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from everstep.base.text import listed
from everstep.decisions.blame.classify.candidates import (
    STEPS_AFTER,
    USER_EXCEPTION,
    EvidenceLine,
    ExitReading,
    LogCandidate,
    candidates_of,
    read_exit_code,
)
from everstep.decisions.blame.classify.rule import FaultClass, Role, Weight
from everstep.decisions.blame.classify.rules import LineMatcher
from everstep.decisions.blame.classify.scan import LogScanner
from everstep.decisions.blame.classify.streams import ScannedLog
from everstep.model.evidence import Classification
from everstep.model.finding import Owner


@dataclass(frozen=True, slots=True)
class OtherCandidate:
    """All candidates of one reason that is not the reason of the cause."""

    fault: FaultClass
    owner: Owner
    reason: str
    consequence: bool
    count: int
    """The number of lines of this reason."""
    ranks: tuple[int, ...]
    line: EvidenceLine
    """The first line of this reason."""


@dataclass(frozen=True, slots=True)
class LogVerdict:
    """The first cause of a failure, as far as its logs and exit code show it."""

    fault: FaultClass
    owner: Owner
    reason: str
    """The name of a rule, the reason of an exit code, ``user-exception``, ``no-known-line``, ``several-causes``, or
    ``finished``: the program had done its work, and failed while it released its resources."""
    consequence: bool = False
    """The best candidate is a consequence: the cause is not in the logs that were read."""
    decided_by: str = ""
    """Why this candidate was chosen as the cause, and not one of the others, in words."""
    ranks: tuple[int, ...] = ()
    """The ranks that show the cause, if the lines or the names of the logs identify ranks."""
    place: str = ""
    """Where in the user's code the exception was raised: ``file:line in function``; empty if not known."""
    evidence: tuple[EvidenceLine, ...] = ()
    count: int = 0
    """The number of lines and exceptions of this reason."""
    others: tuple[OtherCandidate, ...] = ()
    exit: ExitReading | None = None
    lines: int = 0
    """The number of lines that were read."""

    @property
    def headline(self) -> str:
        """The cause in one line for a person."""
        where = f" on rank{'s' if len(self.ranks) > 1 else ''} {listed(self.ranks)}" if self.ranks else ""
        shown = self.evidence[0].text if self.evidence else (self.exit.text if self.exit else "no rule matches a line")
        if self.fault is FaultClass.UNKNOWN and self.others:
            causes = [f"{other.fault} ({other.reason})" for other in self.others if not other.consequence]
            shown = f"{self.decided_by}: {listed(causes)}"
        only = ", a consequence; the cause is not in these logs" if self.consequence else ""
        return f"{self.fault}, owner {self.owner}{where}{only}: {shown}"


ABORT = "sigabrt"
"""The rule of lines that show that a process aborted itself."""
CLOCKS_S = 1.0
"""Times in different logs that differ by at most this many seconds show no order, since clocks of machines differ."""
EVIDENCE = 8
"""Number of lines of the cause that a verdict keeps."""
OTHERS = 12
"""Number of other reasons that a verdict keeps."""


def first_cause(logs: Iterable[ScannedLog], exit_code: int | None = None) -> LogVerdict:
    """Return the verdict over all logs of one failure.

    A cause outranks the end of a process, and an end outranks a consequence. Among ends, and among consequences, a
    decisive line outranks a line that the program may have survived. If candidates of several rules remain, only the
    first candidate of each log counts. Of these, the most certain candidate counts. If several are equally certain, the
    earliest counts, provided that the times differ by more than clocks do. If none of these decides, the class is
    unknown and the verdict names all candidates.

    Args:
        logs: The scanned logs, one for each file or rank.
        exit_code: The exit code of the job or rank, if it is known.
    """
    logs = list(logs)
    reading = None if exit_code is None else read_exit_code(exit_code)
    lines = sum(log.lines for log in logs)
    candidates = [candidate for log in logs for candidate in candidates_of(log)]
    strong = [candidate for candidate in candidates if candidate.weight > Weight.WEAK]
    if reading is not None and reading.fault is FaultClass.NO_FAILURE:
        considered = strong if any(candidate.weight is Weight.DECISIVE for candidate in strong) else []
    else:
        considered = strong or [
            candidate
            for candidate in candidates
            if candidate.weight is Weight.WEAK and candidate.rule.role is not Role.SUMMARY
        ]
    if _has_finished(logs, considered, reading):
        return LogVerdict(
            FaultClass.NO_FAILURE,
            Owner.UNKNOWN,
            "finished",
            decided_by="the program had done its work before",
            others=_others(candidates, ""),
            exit=reading,
            lines=lines,
        )
    considered = _without_explained_aborts(considered)
    if not considered:
        return _without_cause(reading, candidates, lines)
    best = min(candidate.order for candidate in considered)
    top = [candidate for candidate in considered if candidate.order == best]
    # Among causes, the order in time counts more than the certainty.
    if best[0] == Role.CAUSE:
        top = [candidate for candidate in considered if candidate.rule.role is Role.CAUSE]
    elif (
        reading is not None
        and best[0] > Role.END
        and reading.fault not in (FaultClass.UNKNOWN, FaultClass.NO_FAILURE, FaultClass.CRASHED)
    ):
        return _without_cause(reading, candidates, lines)
    cause, how = _choose(top)
    if cause is None:
        return LogVerdict(
            FaultClass.UNKNOWN,
            Owner.UNKNOWN,
            "several-causes",
            decided_by=how,
            others=_others(candidates, ""),
            exit=reading,
            lines=lines,
        )
    return _verdict(cause, how, candidates=candidates, reading=reading, lines=lines)


ENDED_BY_SIGNAL = frozenset({FaultClass.CRASHED, FaultClass.KILLED, FaultClass.TERMINATED})


def _has_finished(logs: Sequence[ScannedLog], considered: Sequence[LogCandidate], reading: ExitReading | None) -> bool:
    """Return whether the program had done its work before anything went wrong, so that only its end failed."""
    by_source = {log.source: log for log in logs}
    if not considered:
        ended = reading is not None and reading.fault in ENDED_BY_SIGNAL
        return ended and bool(logs) and all(_finished_before(log, None, log.lines + 1) for log in logs)
    return all(
        candidate.rule.role is not Role.CAUSE
        and _finished_before(by_source[candidate.line.source], candidate.rank, candidate.line.line)
        for candidate in considered
    )


def _finished_before(log: ScannedLog, rank: int | None, line: int) -> bool:
    """Return whether a log reports before a line that the program, or this rank of it, has done its work."""
    marks = (log.finished.get(None), log.finished.get(rank))
    return any(mark is not None and mark.line < line and log.steps - mark.steps_before < STEPS_AFTER for mark in marks)


def _without_explained_aborts(considered: Sequence[LogCandidate]) -> list[LogCandidate]:
    """Return the candidates without the aborts that a consequence in the same log explains.

    For example, NCCL's watchdog aborts a process that waited in vain.
    """
    waits = {one.line.source for one in considered if one.rule.role in (Role.WAIT, Role.LOSS)}
    return [one for one in considered if one.rule.name != ABORT or one.line.source not in waits]


def _choose(top: Sequence[LogCandidate]) -> tuple[LogCandidate | None, str]:
    """Return the cause, and why it was chosen and not another candidate.

    If candidates of several rules remain, return None and the reason.
    """
    clear = [candidate for candidate in top if not candidate.rule.vague]
    if any(candidate.rule is not USER_EXCEPTION for candidate in clear):
        top = clear
    if len({candidate.rule.name for candidate in top}) == 1:
        return min(top, key=_when), "the only cause"
    by_log: dict[str, list[LogCandidate]] = defaultdict(list)
    for candidate in top:
        by_log[candidate.line.source].append(candidate)
    firsts = [min(in_log, key=lambda candidate: candidate.line.line) for in_log in by_log.values()]
    if len({first.rule.name for first in firsts}) == 1:
        return min(firsts, key=_when), "first in its log"
    best = min(first.order for first in firsts)
    firsts = [first for first in firsts if first.order == best]
    if len({first.rule.name for first in firsts}) == 1:
        return min(firsts, key=_when), "the most certain"
    timed = sorted((first for first in firsts if first.time is not None), key=_when)
    if len(timed) == len(firsts):
        other = next(first for first in timed if first.rule.name != timed[0].rule.name)
        earlier_s = (other.time or 0) - (timed[0].time or 0)
        if earlier_s > CLOCKS_S:
            return timed[0], f"first by time, {earlier_s:.0f} s before the next"
    return None, "several causes, and the logs do not show which was first"


def _when(candidate: LogCandidate) -> tuple[float, str, int]:
    return (candidate.time if candidate.time is not None else float("inf"), candidate.line.source, candidate.line.line)


def _verdict(
    cause: LogCandidate,
    how: str,
    *,
    candidates: Sequence[LogCandidate],
    reading: ExitReading | None,
    lines: int,
) -> LogVerdict:
    rule = cause.rule
    least = min(cause.weight, Weight.PLAIN)
    same = [candidate for candidate in candidates if candidate.rule.name == rule.name and candidate.weight >= least]
    same.sort(key=lambda candidate: (candidate is not cause, _when(candidate)))
    return LogVerdict(
        fault=rule.fault,
        owner=rule.owner,
        reason=rule.name,
        consequence=rule.role.is_consequence,
        decided_by=how,
        ranks=_ranks_of(same),
        place=cause.frame.text if cause.frame else "",
        evidence=tuple(candidate.line for candidate in same[:EVIDENCE]),
        count=sum(candidate.count for candidate in same),
        others=_others(candidates, rule.name),
        exit=reading,
        lines=lines,
    )


def _without_cause(reading: ExitReading | None, candidates: Sequence[LogCandidate], lines: int) -> LogVerdict:
    """Return the verdict if the logs show no cause: the verdict of the exit code, if the code is known."""
    others = _others(candidates, "")
    if reading is None:
        return LogVerdict(FaultClass.UNKNOWN, Owner.UNKNOWN, "no-known-line", others=others, lines=lines)
    return LogVerdict(
        reading.fault,
        reading.owner,
        reading.reason,
        decided_by="the exit code",
        others=others,
        exit=reading,
        lines=lines,
    )


def _others(candidates: Sequence[LogCandidate], cause: str) -> tuple[OtherCandidate, ...]:
    """Return the candidates of all rules except the rule of the cause. Candidates whose role is a cause are first."""
    by_rule: dict[str, list[LogCandidate]] = defaultdict(list)
    for candidate in candidates:
        if candidate.rule.name != cause:
            by_rule[candidate.rule.name].append(candidate)
    groups = sorted(
        by_rule.values(), key=lambda group: min((*candidate.order, *_when(candidate)) for candidate in group)
    )
    return tuple(
        OtherCandidate(
            fault=group[0].rule.fault,
            owner=group[0].rule.owner,
            reason=group[0].rule.name,
            consequence=group[0].rule.role.is_consequence,
            count=sum(candidate.count for candidate in group),
            ranks=_ranks_of(group),
            line=min(group, key=_when).line,
        )
        for group in groups[:OTHERS]
    )


def _ranks_of(candidates: Sequence[LogCandidate]) -> tuple[int, ...]:
    return tuple(sorted({candidate.rank for candidate in candidates if candidate.rank is not None}))


TAIL = 4096
"""Number of characters at the end of a rank's output that are read. A library may wrap the causing exception in another
one, whose text follows: up to 2,400 characters in torch's pipelining, measured."""
EVIDENCE_LINES = 3
"""Number of lines of a rank's output that are stored with its class."""
_MATCHER = LineMatcher()


def classification(exception: str, log_tail: str, exit_code: int | None) -> Classification:
    """Return the class of a rank's end in the form that is stored. ``classify_end`` has the same arguments."""
    verdict = classify_end(exception, log_tail, exit_code)
    return Classification(
        fault=verdict.fault.value,
        owner=verdict.owner.value,
        reason=verdict.reason,
        consequence=verdict.consequence,
        place=verdict.place,
        evidence=[line.text for line in verdict.evidence[:EVIDENCE_LINES]],
    )


@lru_cache(maxsize=4096)
def classify_end(exception: str, log_tail: str, exit_code: int | None) -> LogVerdict:
    """Classify the end of a rank.

    Args:
        exception: The line that names the rank's exception; empty if it raised none.
        log_tail: The end of the rank's error output.
        exit_code: The rank's exit code, or minus the number of its signal; None if it is not known.
    """
    scanner = LogScanner("output", matcher=_MATCHER)
    scanner.feed(log_tail[-TAIL:].encode(errors="replace") + b"\n")
    if exception and not scanner.raised_last(exception):
        scanner.feed(exception.encode(errors="replace") + b"\n")
    return first_cause([scanner.close()], exit_code)
