"""The matches of the rules in one stream of lines: in a log, or in the part of one rank in a shared log."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from everstep.decisions.blame.classify.rule import LogRule, Weight

RECENT = 200
"""The number of matched lines of one stream that are kept, besides the first line of each rule: a log may have
millions."""


@dataclass(frozen=True, slots=True)
class LogHit:
    """A line that a rule knows."""

    rule: LogRule
    line: int
    text: str
    weight: Weight
    time: float | None = None
    """Seconds since 1970, if the line or a line shortly before it has a time."""
    quiet: int = 0
    """The number of lines before this line that belong to no traceback and no rule: they show that the program
    continued."""


@dataclass(slots=True)
class RaisedException:
    """An exception as a traceback, or its last line alone, shows it."""

    line: int
    """The number of the line that names it."""
    text: str
    rule: LogRule | None
    """None: no rule knows it, so it is the script's own."""
    block: Sequence[str] = ()
    """Lines of the traceback, without prefixes."""
    goes_on: bool = False
    """Logged as a warning or less."""
    time: float | None = None
    quiet: int = 0
    """Lines before it that are of no traceback and of no rule, as for a hit."""


@dataclass(slots=True)
class StreamFindings:
    """The hits and exceptions of one stream."""

    source: str
    rank: int | None
    first: dict[str, LogHit] = field(default_factory=dict)
    """The first hit of each rule."""
    recent: deque[LogHit] = field(default_factory=lambda: deque(maxlen=RECENT))
    counts: dict[str, int] = field(default_factory=dict)
    groups: deque[list[RaisedException]] = field(default_factory=lambda: deque(maxlen=8))
    """The last exceptions, each with those that led to it: the first cause first."""
    linked: bool = False
    """The next exception belongs to the last group."""
    before_last: bool = False
    """The next exception is the cause of the last group, although it is printed after it."""

    def hit(self, hit: LogHit) -> None:
        """Record a line that a rule matches."""
        name = hit.rule.name
        self.first.setdefault(name, hit)
        self.counts[name] = self.counts.get(name, 0) + 1
        self.recent.append(hit)

    def raised(self, raised: RaisedException) -> None:
        """Record an exception."""
        if self.groups and self.groups[-1][-1].line == raised.line - 1:
            self.linked = True  # the line of an exception directly below that of another one belongs to its message
        if self.groups and self.before_last:
            self.groups[-1].insert(0, raised)
        elif self.groups and self.linked and len(self.groups[-1]) < RECENT:
            self.groups[-1].append(raised)
        else:
            self.groups.append([raised])
        self.linked = self.before_last = False


@dataclass(slots=True)
class ScannedLog:
    """All streams of one source."""

    source: str
    lines: int
    streams: list[StreamFindings]
    quiet: int
    """Lines that are of no traceback and of no rule."""
