"""Stores what a scan keeps of a log: matched lines and exceptions, in one stream for each rank that the log shows."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from everstep.decisions.blame.classify.rule import LogRule, Weight

RECENT = 200
"""Number of the newest matched lines of a stream that are kept, besides the first line of each rule."""


@dataclass(frozen=True, slots=True)
class LogHit:
    """A line that matches a rule."""

    rule: LogRule
    line: int
    text: str
    weight: Weight
    time: float | None = None
    """Seconds since 1970, if the line or a line shortly before it has a time."""
    ordinary_before: int = 0
    """The number of earlier lines that belong to no traceback and no rule."""
    steps_before: int = 0
    """The number of earlier reports of steps."""


@dataclass(slots=True)
class RaisedException:
    """An exception, from a complete traceback or only from its last line."""

    line: int
    """The number of the line that names the exception."""
    text: str
    rule: LogRule | None
    """None: no rule matches the exception, so it is the script's own."""
    block: Sequence[str] = ()
    """Lines of the traceback, without prefixes."""
    retried: bool = False
    """The line reports that the failed operation is tried again."""
    time: float | None = None
    ordinary_before: int = 0
    """The number of earlier lines that belong to no traceback and no rule."""


@dataclass(slots=True)
class StreamFindings:
    """The hits and exceptions of one stream."""

    source: str
    rank: int | None
    first: dict[str, LogHit] = field(default_factory=dict)
    """The first hit of each rule."""
    recent: deque[LogHit] = field(default_factory=lambda: deque(maxlen=RECENT))
    counts: dict[str, int] = field(default_factory=dict)
    chains: deque[list[RaisedException]] = field(default_factory=lambda: deque(maxlen=8))
    """The last chains of exceptions. In each chain, an exception precedes the exceptions that it caused."""
    linked: bool = False
    """The next exception belongs to the last chain."""
    before_last: bool = False
    """The next exception caused the last chain, although it is printed later."""

    def hit(self, hit: LogHit) -> None:
        """Record a line that a rule matches."""
        name = hit.rule.name
        self.first.setdefault(name, hit)
        self.counts[name] = self.counts.get(name, 0) + 1
        self.recent.append(hit)

    def raised(self, raised: RaisedException) -> None:
        """Record an exception."""
        if self.chains and self.chains[-1][-1].line == raised.line - 1:
            self.linked = True  # of two exception lines in a row, the second belongs to the message of the first
        if self.chains and self.before_last:
            self.chains[-1].insert(0, raised)
        elif self.chains and self.linked and len(self.chains[-1]) < RECENT:
            self.chains[-1].append(raised)
        else:
            self.chains.append([raised])
        self.linked = self.before_last = False


@dataclass(frozen=True, slots=True)
class FinishedLine:
    """A line that reports that the program has done its work."""

    line: int
    steps_before: int


@dataclass(slots=True)
class ScannedLog:
    """The result of scanning one log."""

    source: str
    lines: int
    streams: list[StreamFindings]
    ordinary: int
    """The number of lines that belong to no traceback and no rule."""
    steps: int = 0
    """The number of reports of steps."""
    finished: dict[int | None, FinishedLine] = field(default_factory=dict)
    """The last line with which the program, or a rank of it, reports that it has done its work."""
