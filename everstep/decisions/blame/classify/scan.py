"""The scanner of a log of any size: it reads pieces, and keeps exceptions and the few lines that rules match.

A piece is searched for the triggers (``rules.py``) as a whole; only lines with a trigger are decoded and matched.
While a traceback is open every line is read. The kept data does not grow with the log.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from datetime import UTC, datetime

from everstep.decisions.blame.classify.rule import Weight
from everstep.decisions.blame.classify.rules import TRIGGERS, LineMatcher
from everstep.decisions.blame.classify.streams import LogHit, RaisedException, ScannedLog, StreamFindings
from everstep.decisions.blame.classify.tracebacks import CHAINED, HEADER, exception_line, exception_name

SHOWN = 400
"""Characters of a line that are kept as evidence."""

_ESCAPES = re.compile(r"\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b\[[0-9;?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f]")
_STAMP = (
    r"(?P<year>\d{4})-(?P<month>\d\d)-(?P<day>\d\d)[T _](?P<hour>\d\d):(?P<minute>\d\d):(?P<second>\d\d)"
    r"(?:[.,](?P<fraction>\d{1,9}))?(?P<zone>Z|[+-]\d\d:?\d\d)?"
)
_PARTS = ("year", "month", "day", "hour", "minute", "second")
_TIME = re.compile(_STAMP)
_PREFIX = re.compile(
    r"(?:\s*(?:"
    r"\[(?:[Rr]ank|default|trainer)[ :]?(?P<bracket>\d+)\]:?"  # torch's excepthook, torchrun
    r"|(?P<label>\d{1,6}): "  # srun --label, mpirun
    r"|\[\d+,(?P<mpi>\d+)\]<std(?:err|out)>:"  # mpirun
    r"|\(\w+ pid=\d+(?:, ip=[\d.]+)?\)"  # ray
    rf"|\[?{_STAMP}\]?(?= )"
    r") ?)+"
)
_RANK_ANYWHERE = re.compile(r"\[[Rr]ank ?(\d+)\]|\bRank (\d+)\]|\(local_rank: \d+\) rank[: ](\d+)|^\s+rank\s*: (\d+)")
_RANK_OF_FILE = re.compile(
    r"(?:^|[/_.-])rank[_.-]?(\d+)(?=[^0-9]|$)|/attempt_\d+/(\d+)/std(?:err|out)\.log$", re.IGNORECASE
)
_QUIET = re.compile(
    r"(?<!NCCL )(?<!=)\b(?:WARN(?:ING)?(?! {2,}[A-Z])|INFO|DEBUG|NOTICE)\b|^[WI]\d{4} |Warning: ", re.IGNORECASE
)
_TRIED_AGAIN = re.compile(r"\b(?:retry|retrying|trying again)\b", re.IGNORECASE)


def clean(line: str) -> str:
    """Return a line without colours, NULs and other control characters."""
    return _ESCAPES.sub("", line) if not line.isprintable() else line


def without_prefix(line: str) -> tuple[str, int | None]:
    """A cleaned line without what a launcher or a logger put before it, and the rank that the prefix names."""
    found = _PREFIX.match(line)
    if not found:
        return line, None
    rank = found["bracket"] or found["label"] or found["mpi"]
    return line[found.end() :], None if rank is None else int(rank)


def rank_in(line: str) -> int | None:
    """The rank that a line names as its own; None: none."""
    found = _RANK_ANYWHERE.search(line)
    return next((int(group) for group in found.groups() if group), None) if found else None


def rank_of_file(name: str) -> int | None:
    """Return the rank of a log from its name: ``rank-3.log``, ``attempt_0/3/stderr.log``; None: the name
    has no rank."""
    found = _RANK_OF_FILE.search(name)
    return next((int(group) for group in found.groups() if group), None) if found else None


def says_it_goes_on(line: str) -> bool:
    """Return whether a line calls itself a warning or less: the program survived the event.

    NCCL and the events of Kubernetes also call an event a warning if it ends a process.
    """
    return _QUIET.search(line) is not None or is_tried_again(line)


def is_tried_again(line: str) -> bool:
    """Return whether a line reports that a failed operation is tried again."""
    return _TRIED_AGAIN.search(line) is not None


def time_of(line: str) -> float | None:
    """Return the seconds since 1970 of a line's own date and time, ISO 8601 or nearly so; None: the line has none.

    A time without a zone is read as UTC: the logs of one job are assumed to be in one zone.
    """
    found = _TIME.search(line, 0, 200)
    if not found:
        return None
    try:
        year, month, day, hour, minute, second = map(int, found.group(*_PARTS))
        moment = datetime(year, month, day, hour, minute, second, tzinfo=UTC)
    except ValueError:
        return None
    offset = 0
    if (zone := found["zone"]) and zone != "Z":
        offset = (60 * int(zone[1:3]) + int(zone[-2:])) * (60 if zone[0] == "+" else -60)
    return moment.timestamp() - offset + float(f"0.{found['fraction'] or 0}")


PIECE = 1 << 18
"""Bytes that are searched at once."""
HELD = 1 << 20
"""Bytes without an end of line that are waited for."""
STREAMS = 100_000
"""The number of ranks of one log that are separated; the rest are combined."""
LOOK_BACK = 2000
"""The number of bytes before a line that are searched for a time, if the line has none."""
BLOCK_LINES = 400
"""Lines of a traceback that are read: of a deep recursion the beginning."""
OPEN_LINES = 200_000
"""Lines of all ranks within which a traceback that was begun has to end."""
ALIKE = 60
"""The number of characters by which an exception is recognized again."""
PREFIX_BEGINS = set("[(0123456789")
"""The characters with which a further part of a prefix may begin."""
MESSAGE_LINES = 12
"""Further lines of an exception's message that are looked at."""
ORIGINAL = f"Original {HEADER}"
"""The line with which torch begins the traceback of another process within an exception's message."""
SAYS_LITTLE = {"nccl-system-error", "nccl-error", "nccl-internal-error", "nccl-cuda-error", "cuda-error"}
"""Rules of exceptions whose message may show more in a further line."""


@dataclass(slots=True)
class _Open:
    """A traceback that is being read."""

    begun: int
    """Number of its first line."""
    time: float | None
    block: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Message:
    """An exception whose message may go on."""

    raised: RaisedException
    left: int = MESSAGE_LINES


class LogScanner:
    """The scanner of one log: it accepts the bytes in pieces, and returns the matches."""

    def __init__(self, source: str = "", *, rank: int | None = None, matcher: LineMatcher | None = None) -> None:
        self._source = source
        self._rank = rank_of_file(source) if rank is None else rank
        self._matcher = matcher or LineMatcher()
        self._held = self._before = b""
        self._prefix: tuple[str, int | None] = ("", None)
        self._lines = self._noted = 0
        self._streams: dict[int | None, StreamFindings] = {}
        self._open: dict[int | None, _Open] = {}
        self._messages: dict[int | None, _Message] = {}

    def feed(self, data: bytes) -> None:
        """Accept the next bytes."""
        for at in range(0, len(data), PIECE):
            held = self._held + data[at : at + PIECE] if self._held else data[at : at + PIECE]
            end = max(held.rfind(b"\n"), held.rfind(b"\r")) + 1
            if not end and len(held) > HELD:
                end = len(held)
            self._held = held[end:]
            if end:
                self._read(held[:end])

    def raised_last(self, exception: str) -> bool:
        """Return whether this is the last exception so far; the beginning of a long exception is enough, as lines may
        be cut."""
        last = max(
            (stream.groups[-1][-1] for stream in self._streams.values() if stream.groups),
            key=lambda one: one.line,
            default=None,
        )
        if last is None:
            return False
        if len(exception) > ALIKE:
            return last.text.startswith(exception[:ALIKE])
        return last.text.strip() == exception.strip()

    def close(self) -> ScannedLog:
        """Return the matches."""
        if self._held:
            self._read(self._held)
            self._lines += not self._held.endswith(b"\n")
            self._held = b""
        self._open.clear()
        return ScannedLog(self._source, self._lines, list(self._streams.values()), self._lines - self._noted)

    def _read(self, piece: bytes) -> None:
        """A part of the log that ends with a line."""
        # A progress bar ends its lines with \r alone; they are lines here, and are not counted as such.
        flat = piece.replace(b"\r", b"\n") if b"\r" in piece else piece
        triggered = _starts(flat)
        ordered = sorted(triggered)
        counted, number = 0, self._lines + 1
        at, next_one, size = 0, 0, len(flat)
        while at < size:
            if not self._open and not self._messages:
                while next_one < len(ordered) and ordered[next_one] < at:
                    next_one += 1
                if next_one == len(ordered):
                    break
                at = ordered[next_one]
            end = flat.find(b"\n", at)
            end = size if end < 0 else end
            number += piece.count(b"\n", counted, at)
            counted = at
            line = clean(flat[at : min(end, at + HELD)].decode(errors="replace"))
            text, rank = self._without_prefix(line)
            self._line(line, text, rank, number, _Place(flat, at, self._before), triggered=at in triggered)
            at = end + 1
        self._lines += piece.count(b"\n")
        self._before = (self._before + flat[-LOOK_BACK:])[-LOOK_BACK:]

    def _without_prefix(self, line: str) -> tuple[str, int | None]:
        """Remove the prefix as the function of that name does: most lines have the prefix of the line before."""
        prefix, rank = self._prefix
        rest = line[len(prefix) :]
        if prefix and line.startswith(prefix) and rest[:1] not in PREFIX_BEGINS:
            return rest, rank
        text, rank = without_prefix(line)
        self._prefix = line[: len(line) - len(text)], rank
        return text, rank

    def _line(self, line: str, text: str, rank: int | None, number: int, place: _Place, *, triggered: bool) -> None:
        """Process a line; a line without a trigger counts only if it belongs to an open traceback."""
        message = self._messages.get(rank)
        if message is not None:
            self._go_on(message, text, rank)
        begins = text.lstrip().startswith((HEADER, ORIGINAL))
        if begins:
            stream = self._stream(rank)
            stream.before_last = stream.before_last or text.lstrip().startswith(ORIGINAL)
            self._open[rank] = _Open(number, place.time())
            self._noted += 1
            return
        opened = self._open.get(rank)
        if opened is not None:
            self._noted += 1
            if not text.strip():
                return
            if not text[0].isspace() and exception_line(text):
                del self._open[rank]
                self._raised(line, text, rank, number, block=opened.block, time=opened.time)
            elif len(opened.block) >= BLOCK_LINES or number - opened.begun > OPEN_LINES:
                del self._open[rank]
            else:
                opened.block.append(text)
            return
        if triggered:
            self._one(line, text, rank, number, place, in_message=message is not None)
        if self._open:
            self._forget(number)

    def _go_on(self, message: _Message, text: str, rank: int | None) -> None:
        """Process a further line of an exception's message, which may show more than the first line."""
        message.left -= 1
        stripped = text.strip()
        if not stripped or not message.left or HEADER in text or stripped.startswith(CHAINED):
            del self._messages[rank]
            return
        rule = self._matcher.rule_of(text)
        if rule is not None and rule.name not in SAYS_LITTLE:
            message.raised.rule = rule
            message.raised.text = f"{message.raised.text[: SHOWN // 2]} … {stripped}"[:SHOWN]
            del self._messages[rank]

    def _one(self, line: str, text: str, rank: int | None, number: int, place: _Place, *, in_message: bool) -> None:
        """A line that is no part of a traceback."""
        stripped = text.strip()
        if stripped.startswith(CHAINED):
            self._stream(rank).linked = True
            return
        rule = self._matcher.rule_of(text)
        name = exception_name(text)
        # The beginning of a traceback may be cut off, and a wrong script has none.
        if name.endswith(("Error", "Exception")) or (rule is not None and "." in name):
            if not in_message:
                self._noted += 1
                self._raised(line, text, rank, number, block=[], time=place.time())
        elif rule is not None:
            rank = rank_in(text) if rank is None else rank
            weight = rule.weight
            if weight < Weight.DECISIVE and says_it_goes_on(line[:SHOWN]):
                weight = Weight.SURVIVED
            self._noted += 1
            hit = LogHit(rule, number, stripped[:SHOWN], weight, place.time(), number - self._noted)
            self._stream(rank).hit(hit)

    def _raised(
        self, line: str, text: str, rank: int | None, number: int, *, block: list[str], time: float | None
    ) -> None:
        rule = self._matcher.rule_of(text)
        goes_on = not block and is_tried_again(line[:SHOWN])
        raised = RaisedException(
            number, text[:SHOWN], rule, block, goes_on=goes_on, time=time, quiet=number - self._noted
        )
        self._stream(rank).raised(raised)
        if rule is not None and rule.name in SAYS_LITTLE:
            self._messages[rank] = _Message(raised)

    def _forget(self, number: int) -> None:
        """Drop tracebacks that do not end."""
        if number % BLOCK_LINES == 0:
            self._open = {rank: one for rank, one in self._open.items() if number - one.begun <= OPEN_LINES}

    def _stream(self, rank: int | None) -> StreamFindings:
        """The findings of a rank; ``None``: of the log itself."""
        rank = self._rank if rank is None else rank
        found = self._streams.get(rank)
        if found is None:
            rank = rank if len(self._streams) < STREAMS else None
            found = self._streams.setdefault(rank, StreamFindings(self._source, rank))
        return found


@dataclass(frozen=True, slots=True)
class _Place:
    """The position at which a line begins in a piece."""

    flat: bytes
    at: int
    before: bytes
    """The text before the piece."""

    def time(self) -> float | None:
        """Return the time of the line, or of the last line before it that has a time."""
        own = time_of(self.flat[self.at : self.at + 200].split(b"\n", 1)[0].decode(errors="replace"))
        if own is not None:
            return own
        known = self.flat[max(0, self.at - LOOK_BACK) : self.at]
        lines = (self.before + known if self.at < LOOK_BACK else known).decode(errors="replace").split("\n")
        return next((found for line in reversed(lines) if (found := time_of(line)) is not None), None)


def _starts(flat: bytes) -> set[int]:
    """Return the positions at which lines with a trigger begin.

    A search for each trigger needs a third of the time of one expression for all triggers, at any size.
    """
    lowered = flat.lower()
    starts = set()
    for trigger in TRIGGERS:
        at = lowered.find(trigger)
        while at >= 0:
            starts.add(flat.rfind(b"\n", 0, at) + 1)
            end = flat.find(b"\n", at)
            at = lowered.find(trigger, end) if end >= 0 else -1
    return starts
