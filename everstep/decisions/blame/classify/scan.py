"""Scans a log of any size, and keeps exceptions and the few lines that match a rule.

The scanner searches the bytes of the log for the triggers of ``rules.py``, and decodes only lines with a trigger.
Inside a traceback it reads every line. What it keeps does not grow with the log.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import takewhile
from typing import NamedTuple

from everstep.decisions.blame.classify.rule import Weight
from everstep.decisions.blame.classify.rules import FRAME_RULES, NAN, STEPS, TRIGGERS, LineMatcher
from everstep.decisions.blame.classify.streams import (
    FinishedLine,
    LogHit,
    RaisedException,
    ScannedLog,
    StreamFindings,
)
from everstep.decisions.blame.classify.tracebacks import CHAINED, HEADER, exception_name, innermost
from everstep.model.finding import Owner

SHOWN = 400
"""Number of characters of a line that are kept."""

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
    r"|(?:[A-Z][a-z]{2} [A-Z][a-z]{2} [ \d]\d [\d:]{8} \d{4})?"  # mpirun --timestamp-output
    r"(?:\[(?:\S+@)?\d+,(?:mpirank:)?(?P<mpi>\d+)(?:,[\w.-]+)?\])?<std(?:err|out|diag)>:"  # mpirun, SageMaker
    r"|worker-\d+: "  # DeepSpeed over several nodes
    r"|\((?:[^\s(),]+(?:\([^()]*\))?,? )?(?:rank=\d+, )?pid=\d+(?:, ip=[\da-f.:]+)?\)"  # Ray, SkyPilot
    r"|\[pod/\S+\]"  # kubectl logs --prefix
    rf"|\[?{_STAMP}\]?:?"
    r"(?: std(?:err|out) [FP]"  # files of the container runtime
    r"|(?: [\da-f]{4,})?(?: \[rank=(?P<determined>\d+)\])? \|\|"  # Determined
    r")?(?= |$)"
    # These look like other text, so a traceback has to follow: pdsh and mpiexec -l, syslog, stern, docker compose.
    r"|(?P<shipper>[a-z\d][a-z\d_.-]*:|\[\d+\]|(?:[A-Z][a-z]{2} [ \d]\d [\d:]{8} )?[\w.-]+ [\w./-]+\[\d+\]:"
    r"|[a-z\d.]+-[a-z\d.-]+ [a-z][a-z\d-]*|[\w.-]+ +\|)"
    r" (?=(?:\[rank\d+\]: )?(?:(?:Original )?Traceback \(most|During handling of|The above exception| {2}File \"))"
    r") ?)+"
)
_RANK_ANYWHERE = re.compile(r"\[[Rr]ank ?(\d+)\]|\bRank (\d+)\]|\(local_rank: \d+\) rank[: ](\d+)|^\s+rank\s*: (\d+)")
_RANK_OF_FILE = re.compile(
    r"(?:^|[/_.-])rank[_.-]?(\d+)(?=[^0-9]|$)|/attempt_\d+/(\d+)/std(?:err|out)\.log$", re.IGNORECASE
)
_MILD = re.compile(
    r"(?<!NCCL )(?<!=)\bWARN(?:ING)?(?! {2,}[A-Z])\b|(?<!=)\b(?:INFO|DEBUG|NOTICE)\b|^[WI]\d{4} |Warning: "
    r"|severity=Corrected|\bCorrected error\b|^\s*wandb: |\b(?:nvidia-smi|rocm-smi|ibstat|numactl|lspci)\b.*: not found"
    r"|\b(?:nvidia-smi|rocm-smi|ibstat|numactl|lspci): command not found",
    re.IGNORECASE,
)
_RETRIED = re.compile(
    r"\b(?:retry(?! count| attempts failed)|retrying|trying again|fall(?:s|ing)? back|fallback|using internal "
    r"implementation|ignoring|ignored"
    r"|skipping|will be skipped|disabling)\b",
    re.IGNORECASE,
)
_FINISHED = re.compile(
    r"\b(?:training|train\.py|main|run|job|fit)\b.{0,20}\b(?:done|completed?|finished)\b(?! \d+(?:\.\d+)? ?%)"
    r"|\bEnd time of running main\b|'train_runtime':|`Trainer\.fit` stopped: `max_\w+=|\bfinished training\b",
    re.IGNORECASE,
)


def clean(line: str) -> str:
    """Return a line without colours and other control characters."""
    return _ESCAPES.sub("", line) if not line.isprintable() else line


def without_prefix(line: str) -> tuple[str, int | None]:
    """Return a cleaned line without the prefix of a launcher or logger, and the rank that the prefix names."""
    prefix = _PREFIX.match(line)
    if not prefix:
        return line, None
    rank = prefix["bracket"] or prefix["label"] or prefix["mpi"] or prefix["determined"]
    return line[prefix.end() :], None if rank is None else int(rank)


def rank_in(line: str) -> int | None:
    """Return the rank that a line is about; None if it names no rank."""
    return _number_in(_RANK_ANYWHERE.search(line))


def rank_of_file(name: str) -> int | None:
    """Return the rank in the name of a log (``rank-3.log``, ``attempt_0/3/stderr.log``); None if there is none."""
    return _number_in(_RANK_OF_FILE.search(name))


def _number_in(match: re.Match[str] | None) -> int | None:
    return next((int(group) for group in match.groups() if group), None) if match else None


def is_survived(line: str) -> bool:
    """Return whether the program survived the event of a line: the line is mild, or the operation is tried again.

    The level "warning" proves nothing in lines of NCCL and of Kubernetes, which use it for fatal events too. If a tool
    that only reports on the machine is missing, the training does not end.
    """
    return _MILD.search(line) is not None or is_retried(line)


def is_retried(line: str) -> bool:
    """Return whether a line reports that a failed operation is tried again, or that the program does without it."""
    return _RETRIED.search(line) is not None


def time_of(line: str) -> float | None:
    """Return the date and time in a line (similar to ISO 8601) as seconds since 1970; None if the line has none.

    A time without a zone counts as UTC: all logs of a job are assumed to be in one zone.
    """
    match = _TIME.search(line, 0, 200)
    if not match:
        return None
    try:
        year, month, day, hour, minute, second = map(int, match.group(*_PARTS))
        moment = datetime(year, month, day, hour, minute, second, tzinfo=UTC)
    except ValueError:
        return None
    offset = 0
    if (zone := match["zone"]) and zone != "Z":
        offset = (60 * int(zone[1:3]) + int(zone[-2:])) * (60 if zone[0] == "+" else -60)
    return moment.timestamp() - offset + float(f"0.{match['fraction'] or 0}")


PIECE = 1 << 18
"""Number of bytes that are searched at once."""
LONGEST_LINE = 1 << 20
"""Number of bytes without an end of line after which a line is cut."""
STREAMS = 100_000
"""Number of ranks of one log that are kept apart; lines of further ranks are combined."""
TIME_WITHIN = 2000
"""Number of bytes before a line that are searched for a time, if the line has none, and for the frames of an exception
whose traceback has no header."""
BLOCK_LINES = 400
"""A traceback with this many lines is dropped. The line that names its exception then counts without the traceback."""
OPEN_LINES = 200_000
"""Number of lines of the log, of all ranks, within which a traceback has to end."""
ALIKE = 60
"""Number of characters that are compared to recognize an exception again."""
PREFIX_BEGINS = set("[(0123456789")
"""The characters with which a further part of a prefix may begin."""
SHIPPERS = 64
"""Number of prefixes of shippers of logs that are remembered."""
MESSAGE_LINES = 12
"""Number of further lines of an exception's message that are read."""
ORIGINAL = f"Original {HEADER}"
"""The line with which torch begins the traceback of another process within an exception's message."""
OF_HARDWARE = frozenset({Owner.MACHINE, Owner.NETWORK})
OF_SCRIPTS = frozenset(
    {
        "ArithmeticError",
        "AssertionError",
        "AttributeError",
        "IndexError",
        "KeyError",
        "NameError",
        "NotImplementedError",
        "TypeError",
        "ValueError",
        "ZeroDivisionError",
    }
)
"""Exceptions that Python code raises about its own values; no driver or library reports a fault of hardware by them."""
UNCAUGHT = "uncaught-cpp-exception"
"""Name of the rule for the line that precedes the message of a C++ exception."""
MESSAGE = "what():"
"""The beginning of the message of a C++ exception."""


class _Line(NamedTuple):
    """One line of a log, and its position."""

    raw: str
    """The line without control characters."""
    text: str
    """The line without control characters and without its prefix."""
    rank: int | None
    """The rank that the prefix names."""
    number: int
    flat: bytes
    """The piece of the log that contains the line. Each line of the piece ends with a newline."""
    at: int
    """The position of the line in the piece."""
    before: bytes
    """The end of the text before the piece."""

    def time(self) -> float | None:
        """Return the time of the line, or of the last line before it that has a time."""
        own = time_of(self.flat[self.at : self.at + 200].split(b"\n", 1)[0].decode(errors="replace"))
        if own is not None:
            return own
        return next((time for line in self._lines_above() if (time := time_of(line)) is not None), None)

    def frames(self) -> list[str]:
        """Return the frames of a traceback right above the line, without prefixes: its header may be cut off."""
        above = (without_prefix(clean(line))[0] for line in self._lines_above())
        block = list(takewhile(lambda text: text.startswith("  "), above))[::-1]
        return block if innermost(block) else []

    def _lines_above(self) -> list[str]:
        """Return the lines before the line, the nearest first. The last one may be cut."""
        near = self.flat[max(0, self.at - TIME_WITHIN) : self.at]
        text = (self.before + near)[-TIME_WITHIN:] if self.at < TIME_WITHIN else near
        return text.decode(errors="replace").removesuffix("\n").split("\n")[::-1]


@dataclass(slots=True)
class _OpenTraceback:
    """A traceback whose exception has not been read yet."""

    begun: int
    """The number of its first line."""
    time: float | None
    block: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _OpenMessage:
    """An exception whose message may have further lines."""

    raised: RaisedException
    left: int = MESSAGE_LINES


class LogScanner:
    """The scanner of one log: it accepts the bytes in pieces, and returns the matches."""

    def __init__(self, source: str = "", *, rank: int | None = None, matcher: LineMatcher | None = None) -> None:
        self._source = source
        self._rank = rank_of_file(source) if rank is None else rank
        self._matcher = matcher or LineMatcher()
        self._unread = self._before = b""
        self._prefix: tuple[str, int | None] = ("", None)
        self._shippers: tuple[str, ...] = ()
        self._lines = self._matched = 0
        self._steps = 0
        self._finished: dict[int | None, FinishedLine] = {}
        self._uncaught: deque[tuple[int | None, LogHit]] = deque()
        self._streams: dict[int | None, StreamFindings] = {}
        self._tracebacks: dict[int | None, _OpenTraceback] = {}
        self._messages: dict[int | None, _OpenMessage] = {}

    def feed(self, data: bytes) -> None:
        """Accept the next bytes."""
        for at in range(0, len(data), PIECE):
            unread = self._unread + data[at : at + PIECE] if self._unread else data[at : at + PIECE]
            end = max(unread.rfind(b"\n"), unread.rfind(b"\r")) + 1
            if not end and len(unread) > LONGEST_LINE:
                end = len(unread)
            self._unread = unread[end:]
            if end:
                self._read(unread[:end])

    def raised_last(self, exception: str) -> bool:
        """Return whether an exception is the last one so far.

        Only the beginning of a long line is compared, since lines may be cut.
        """
        last = max(
            (stream.chains[-1][-1] for stream in self._streams.values() if stream.chains),
            key=lambda raised: raised.line,
            default=None,
        )
        if last is None:
            return False
        if len(exception) > ALIKE:
            return last.text.startswith(exception[:ALIKE])
        return last.text.strip() == exception.strip()

    def close(self) -> ScannedLog:
        """Return the matches."""
        if self._unread:
            self._read(self._unread)
            self._lines += not self._unread.endswith(b"\n")
            self._unread = b""
        self._tracebacks.clear()
        while self._uncaught:
            self._keep_uncaught()
        ordinary = self._lines - self._matched
        return ScannedLog(
            self._source, self._lines, list(self._streams.values()), ordinary, self._steps, dict(self._finished)
        )

    def _read(self, piece: bytes) -> None:
        """Read a part of the log that ends with a complete line."""
        # A progress bar ends its lines with \r alone. These are lines here, but do not count in line numbers.
        flat = piece.replace(b"\r", b"\n") if b"\r" in piece else piece
        lowered = flat.lower()
        triggered = triggered_lines(lowered)
        ordered = sorted(triggered)
        counted, number = 0, self._lines + 1
        at, next_one, size = 0, 0, len(flat)
        while at < size:
            if not self._tracebacks and not self._messages:
                while next_one < len(ordered) and ordered[next_one] < at:
                    next_one += 1
                if next_one == len(ordered):
                    break
                at = ordered[next_one]
            end = flat.find(b"\n", at)
            end = size if end < 0 else end
            number += piece.count(b"\n", counted, at)
            self._count_steps(lowered, counted, at)
            counted = at
            raw = clean(flat[at : min(end, at + LONGEST_LINE)].decode(errors="replace"))
            text, rank = self._without_prefix(raw)
            self._line(_Line(raw, text, rank, number, flat, at, self._before), triggered=at in triggered)
            at = end + 1
        self._lines += piece.count(b"\n")
        self._count_steps(lowered, counted, size)
        self._before = (self._before + flat[-TIME_WITHIN:])[-TIME_WITHIN:]

    def _count_steps(self, lowered: bytes, begin: int, end: int) -> None:
        """Count the reports of steps. Reports before the first finding are not counted, since they do not matter."""
        if begin < end and (self._streams or self._finished):
            self._steps += sum(1 for step in STEPS for _ in step.finditer(lowered, begin, end))

    def _without_prefix(self, line: str) -> tuple[str, int | None]:
        """Return what ``without_prefix`` returns, but faster if a line has the prefix of the line before it.

        A prefix that is recognized only before the beginning of a traceback is removed from the lines after it too.
        """
        prefix, rank = self._prefix
        rest = line[len(prefix) :]
        if prefix and line.startswith(prefix) and rest[:1] not in PREFIX_BEGINS:
            return rest, rank
        text, rank = without_prefix(line)
        if text.startswith(HEADER) and (shipper := _PREFIX.match(line)) and shipper["shipper"]:
            self._shippers = tuple(dict.fromkeys((*self._shippers, f"{shipper['shipper']} ")))[-SHIPPERS:]
        elif text.startswith(self._shippers):
            shipped = next(shipper for shipper in self._shippers if text.startswith(shipper))
            text, inner = without_prefix(text.removeprefix(shipped))
            rank = inner if rank is None else rank
        self._prefix = line[: len(line) - len(text)], rank
        return text, rank

    def _line(self, line: _Line, *, triggered: bool) -> None:
        """Process a line; a line without a trigger counts only inside a traceback or an exception's message."""
        text, rank = line.text, line.rank
        message = self._messages.get(rank)
        if message is not None:
            self._further_line(message, line)
        if text.lstrip().startswith((HEADER, ORIGINAL)):
            stream = self._stream(rank)
            stream.before_last = stream.before_last or text.lstrip().startswith(ORIGINAL)
            self._tracebacks[rank] = _OpenTraceback(line.number, line.time())
            self._matched += 1
            return
        traceback = self._tracebacks.get(rank)
        if traceback is not None:
            self._matched += 1
            if not text.strip():
                return
            if exception_name(text):
                del self._tracebacks[rank]
                self._raised(line, traceback.block, traceback.time)
            elif len(traceback.block) >= BLOCK_LINES or line.number - traceback.begun > OPEN_LINES:
                del self._tracebacks[rank]
            else:
                traceback.block.append(text)
            return
        if triggered:
            self._single_line(line, in_message=message is not None)
        if self._tracebacks and line.number % BLOCK_LINES == 0:
            self._drop_endless(line.number)

    def _further_line(self, message: _OpenMessage, line: _Line) -> None:
        """Process a further line of an exception's message, which may name a clearer cause than the first line."""
        message.left -= 1
        stripped = line.text.strip()
        if not stripped or not message.left or HEADER in line.text or stripped.startswith(CHAINED):
            del self._messages[line.rank]
            return
        rule = self._matcher.rule_of(line.text)
        if rule is not None and not rule.vague:
            message.raised.rule = rule
            message.raised.text = f"{message.raised.text[: SHOWN // 2]} … {stripped}"[:SHOWN]
            del self._messages[line.rank]

    def _single_line(self, line: _Line, *, in_message: bool) -> None:
        """Process a line outside of tracebacks."""
        stripped = line.text.strip()
        if stripped.startswith(CHAINED):
            self._stream(line.rank).linked = True
            return
        rule = self._matcher.rule_of(line.text)
        name = exception_name(line.text)
        if stripped.startswith(MESSAGE) and self._uncaught:
            if rule is None:
                self._keep_uncaught()
            else:
                self._uncaught.popleft()
        if rule is None and _FINISHED.search(stripped):
            self._finished[rank_in(line.text) if line.rank is None else line.rank] = FinishedLine(
                line.number, self._steps
            )
            return
        # The beginning of a traceback may be cut off, and a syntax error in the script has none.
        if name.endswith(("Error", "Exception")) or (rule is not None and "." in name):
            if not in_message:
                self._matched += 1
                self._raised(line, line.frames(), line.time())
        elif rule is not None:
            rank = rank_in(line.text) if line.rank is None else line.rank
            weight = rule.weight
            if weight < Weight.DECISIVE and is_survived(line.raw[:SHOWN]):
                weight = Weight.SURVIVED
            self._matched += 1
            ordinary = line.number - self._matched
            hit = LogHit(rule, line.number, stripped[:SHOWN], weight, line.time(), ordinary, self._steps)
            if rule.name == UNCAUGHT:
                self._uncaught.append((rank, hit))
            else:
                self._stream(rank).hit(hit)

    def _keep_uncaught(self) -> None:
        """Record the oldest C++ exception that waits for its message: the message names no clearer cause, or never
        came."""
        rank, hit = self._uncaught.popleft()
        self._stream(rank).hit(hit)

    def _raised(self, line: _Line, block: list[str], time: float | None) -> None:
        """Record the exception that a line names."""
        rule = self._matcher.rule_of(line.text)
        if rule is not None and rule.owner in OF_HARDWARE and exception_name(line.text) in OF_SCRIPTS:
            rule = None  # the script only mentions such a fault: drivers and libraries raise other exceptions
        if rule is None and block:
            ended = f"{innermost(block)} {line.text}"
            rule = next((rule for rule in FRAME_RULES if rule.is_in(ended)), None)
        raised = RaisedException(
            line.number,
            line.text[:SHOWN],
            rule,
            block,
            retried=not block and is_retried(line.raw[:SHOWN]),
            time=time,
            ordinary_before=line.number - self._matched,
        )
        self._stream(line.rank).raised(raised)
        if rule is not None and rule.vague:
            self._messages[line.rank] = _OpenMessage(raised)

    def _drop_endless(self, number: int) -> None:
        """Drop the tracebacks that have not ended in time."""
        self._tracebacks = {
            rank: traceback for rank, traceback in self._tracebacks.items() if number - traceback.begun <= OPEN_LINES
        }

    def _stream(self, rank: int | None) -> StreamFindings:
        """Return the stream of a rank; for a line without a rank, return the stream of the log's own rank."""
        rank = self._rank if rank is None else rank
        stream = self._streams.get(rank)
        if stream is None:
            rank = rank if len(self._streams) < STREAMS else None
            stream = self._streams.setdefault(rank, StreamFindings(self._source, rank))
        return stream


def triggered_lines(lowered: bytes) -> set[int]:
    """Return the positions at which lines with a trigger begin, in a text in lower case.

    A search for each trigger needs a third of the time of one regular expression for all of them.
    """
    starts = {lowered.rfind(b"\n", 0, found.start()) + 1 for found in NAN.finditer(lowered)}
    for trigger in TRIGGERS:
        at = lowered.find(trigger)
        while at >= 0:
            starts.add(lowered.rfind(b"\n", 0, at) + 1)
            end = lowered.find(b"\n", at)
            at = lowered.find(trigger, end) if end >= 0 else -1
    return starts
