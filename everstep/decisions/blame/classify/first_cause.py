"""The first cause of a failure: among the logs of all ranks, or in the output of one rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from everstep.base.text import listed
from everstep.decisions.blame.classify.candidates import (
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
    """Another candidate beside the cause, by reason."""

    fault: FaultClass
    owner: Owner
    reason: str
    consequence: bool
    count: int
    """Lines."""
    ranks: tuple[int, ...]
    line: EvidenceLine
    """The first of them."""


@dataclass(frozen=True, slots=True)
class LogVerdict:
    """The first cause of a failure, as far as logs and exit code show it."""

    fault: FaultClass
    owner: Owner
    reason: str
    """Name of the rule, or ``user-exception``, ``no-known-line``, ``several-causes`` or of an exit code."""
    consequence: bool = False
    """All candidates are consequences: the cause is not in the logs that were read."""
    decided_by: str = ""
    """The way in which the cause was separated from the other candidates."""
    ranks: tuple[int, ...] = ()
    """The ranks that show the cause, if lines or names of logs identify ranks."""
    place: str = ""
    """``file:line in function`` of the user's code, of an exception."""
    evidence: tuple[EvidenceLine, ...] = ()
    count: int = 0
    """Lines and exceptions of this reason."""
    others: tuple[OtherCandidate, ...] = ()
    exit: ExitReading | None = None
    lines: int = 0
    """The number of lines that were read."""

    @property
    def headline(self) -> str:
        """The cause in one line for a person."""
        where = f" on rank{'s' if len(self.ranks) > 1 else ''} {listed(self.ranks)}" if self.ranks else ""
        said = self.evidence[0].text if self.evidence else (self.exit.text if self.exit else "no line is known")
        if self.fault is FaultClass.UNKNOWN and self.others:
            said = f"{self.decided_by}: " + listed(
                [f"{one.fault} ({one.reason})" for one in self.others if not one.consequence]
            )
        only = ", a consequence; the cause is not in these logs" if self.consequence else ""
        return f"{self.fault}, owner {self.owner}{where}{only}: {said}"


CLOCKS_S = 1.0
"""The difference, seconds, below which times of different logs have no order: clocks of machines differ."""
EVIDENCE = 8
"""Lines that are kept of the cause."""
OTHERS = 12
"""The number of other candidates that are named."""


def first_cause(logs: Iterable[ScannedLog], exit_code: int | None = None) -> LogVerdict:
    """Return the verdict over all logs of one failure.

    The best of each stream is compared: a cause before an end, an end before a consequence; a decisive line before a
    line that the program may have survived. If several remain, the order within a log, times that differ by more than
    clocks do, and the number of ranks decide, in this order; else the class is unknown and all are named.

    Args:
        logs: The scanned logs, one for each file or rank.
        exit_code: The exit code of the job or rank, if it is known.
    """
    logs = list(logs)
    reading = None if exit_code is None else read_exit_code(exit_code)
    lines = sum(log.lines for log in logs)
    found = [candidate for log in logs for candidate in candidates_of(log)]
    strong = [one for one in found if one.weight > Weight.WEAK]
    if reading is not None and reading.fault is FaultClass.NO_FAILURE and not _ended(strong):
        return _of_exit(reading, found, lines)
    pool = strong or ([] if reading is not None and reading.code == 0 else _only_weak(found))
    if not pool:
        return (
            _of_exit(reading, found, lines)
            if reading
            else LogVerdict(FaultClass.UNKNOWN, Owner.UNKNOWN, "no-known-line", others=_others(found, ""), lines=lines)
        )
    best = min(candidate.order for candidate in pool)
    top = [candidate for candidate in pool if candidate.order == best]
    # For causes, their order in time counts more than the certainty of each.
    if best[0] == Role.CAUSE:
        top = [candidate for candidate in pool if candidate.rule.role is Role.CAUSE]
    elif (
        reading is not None
        and best[0] > Role.END
        and reading.fault not in (FaultClass.UNKNOWN, FaultClass.NO_FAILURE, FaultClass.CRASHED)
    ):
        return _of_exit(reading, found, lines)
    chosen, how = _choose(top)
    if chosen is None:
        return LogVerdict(
            FaultClass.UNKNOWN,
            Owner.UNKNOWN,
            "several-causes",
            decided_by=how,
            others=_others(found, ""),
            exit=reading,
            lines=lines,
        )
    same = [
        one for one in found if one.rule.name == chosen.rule.name and one.weight >= min(chosen.weight, Weight.PLAIN)
    ]
    return _verdict(chosen, same, how, found=found, reading=reading, lines=lines)


def _ended(strong: Sequence[LogCandidate]) -> bool:
    """Return whether a line shows that a process ended, whatever the exit code of the job."""
    return any(candidate.weight is Weight.DECISIVE for candidate in strong)


def _only_weak(found: Sequence[LogCandidate]) -> list[LogCandidate]:
    """Return the weak candidates, which count if there is nothing else; survived faults and summaries of launchers
    never count."""
    return [one for one in found if one.weight is Weight.WEAK and one.rule.role is not Role.SUMMARY]


def _choose(top: Sequence[LogCandidate]) -> tuple[LogCandidate | None, str]:
    """Return the cause, and how it was separated; None: it cannot be separated."""
    kinds = {candidate.rule.name for candidate in top}
    if len(kinds) == 1:
        return min(top, key=_when), "the only cause"
    by_log: dict[str, list[LogCandidate]] = defaultdict(list)
    for one in top:
        by_log[one.line.source].append(one)
    firsts = [min(group, key=lambda one: one.line.line) for group in by_log.values()]
    if len({first.rule.name for first in firsts}) == 1:
        return min(firsts, key=_when), "first in its log"
    best = min(first.order for first in firsts)
    firsts = [first for first in firsts if first.order == best]
    if len({first.rule.name for first in firsts}) == 1:
        return min(firsts, key=_when), "the most certain"
    timed = sorted((first for first in firsts if first.time is not None), key=_when)
    if len(timed) == len(firsts):
        other = next(event for event in timed if event.rule.name != timed[0].rule.name)
        if (other.time or 0) - (timed[0].time or 0) > CLOCKS_S:
            return timed[0], f"first by time, {(other.time or 0) - (timed[0].time or 0):.0f} s before the next"
    return None, "several causes, and nothing says which was first"


def _when(one: LogCandidate) -> tuple[float, str, int]:
    return (one.time if one.time is not None else float("inf"), one.line.source, one.line.line)


def _verdict(
    chosen: LogCandidate,
    same: Sequence[LogCandidate],
    how: str,
    *,
    found: Sequence[LogCandidate],
    reading: ExitReading | None,
    lines: int,
) -> LogVerdict:
    rule = chosen.rule
    order = sorted(same, key=lambda one: (one is not chosen, _when(one)))
    return LogVerdict(
        fault=rule.fault,
        owner=rule.owner,
        reason=rule.name,
        consequence=rule.role.is_consequence,
        decided_by=how,
        ranks=tuple(sorted({one.rank for one in same if one.rank is not None})),
        place=chosen.frame.text if chosen.frame else "",
        evidence=tuple(one.line for one in order[:EVIDENCE]),
        count=sum(one.count for one in same),
        others=_others(found, rule.name),
        exit=reading,
        lines=lines,
    )


def _of_exit(reading: ExitReading, found: Sequence[LogCandidate], lines: int) -> LogVerdict:
    return LogVerdict(
        reading.fault,
        reading.owner,
        reading.reason,
        decided_by="the exit code",
        others=_others(found, ""),
        exit=reading,
        lines=lines,
    )


def _others(found: Sequence[LogCandidate], chosen: str) -> tuple[OtherCandidate, ...]:
    """Return the other candidates by reason, causes first."""
    by_name: dict[str, list[LogCandidate]] = defaultdict(list)
    for one in found:
        if one.rule.name != chosen:
            by_name[one.rule.name].append(one)
    groups = sorted(by_name.values(), key=lambda group: min((*one.order, *_when(one)) for one in group))
    return tuple(
        OtherCandidate(
            fault=group[0].rule.fault,
            owner=group[0].rule.owner,
            reason=group[0].rule.name,
            consequence=group[0].rule.role.is_consequence,
            count=sum(one.count for one in group),
            ranks=tuple(sorted({one.rank for one in group if one.rank is not None})),
            line=min(group, key=_when).line,
        )
        for group in groups[:OTHERS]
    )


TAIL = 4096
"""The number of characters at the end of a rank's output that are read: libraries wrap an exception in another, and the
cause is above it (2,400 characters above the end for one of torch's pipelining, measured)."""
EVIDENCE_LINES = 3
"""The number of lines of a rank's output that are kept as evidence of its class."""
_MATCHER = LineMatcher()


def classification(exception: str, log_tail: str, exit_code: int | None) -> Classification:
    """Return the class of a rank's end in its stored form; the arguments are those of ``classify_end``."""
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
        exception: The line that names the exception of the rank; empty: it raised none.
        log_tail: The end of the rank's error output.
        exit_code: The rank's code, or minus its signal; None: not known.
    """
    scanner = LogScanner("output", matcher=_MATCHER)
    scanner.feed(log_tail[-TAIL:].encode(errors="replace") + b"\n")
    if exception and not scanner.raised_last(exception):
        scanner.feed(exception.encode(errors="replace") + b"\n")
    return first_cause([scanner.close()], exit_code)
