"""Reads a log of any size in pieces: finds the few lines that rules know, and the exceptions.

A piece is searched for the triggers (``all.py``) as a whole; only lines with one of them are decoded and matched. A
traceback is read line by line. What is kept does not grow with the log.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence

from everstep.decisions.classify.all import TRIGGERS
from everstep.decisions.classify.findings import LogHit, RaisedException, ScannedLog, StreamFindings
from everstep.decisions.classify.lines import SHOWN, clean, rank_in, rank_of_file, says_it_goes_on, time_of, without_prefix
from everstep.decisions.classify.match import LineMatcher
from everstep.decisions.classify.rule import LogRule, Weight
from everstep.decisions.classify.tracebacks import CHAINED, HEADER, exception_line, exception_name

PIECE = 1 << 18
"""Bytes that are searched at once (ours)."""
HELD = 1 << 20
"""Bytes without an end of line, or of one traceback, that are waited for (ours)."""
STREAMS = 100_000
"""Ranks of one log that are told apart (ours); the others are taken together."""
LOOK_BACK = 2000
"""Bytes before a line in which a time is looked for, where it has none (ours)."""
MESSAGE_LINES = 12
"""Lines of an exception's message that are looked at (ours)."""
BLOCK_LINES = 400
"""Lines of a traceback that are read (ours): of a deep recursion the beginning."""


class LogScanner:
    """Takes the bytes of one log, in pieces, and gives what was found."""

    def __init__(self, source: str = "", *, rank: int | None = None, matcher: LineMatcher | None = None) -> None:
        self._source = source
        self._rank = rank_of_file(source) if rank is None else rank
        self._matcher = matcher or LineMatcher()
        self._held = b""
        self._lines = 0
        self._streams: dict[int | None, StreamFindings] = {}

    def feed(self, data: bytes) -> None:
        """Take the next bytes."""
        for at in range(0, len(data), PIECE):
            self._held += data[at : at + PIECE]
            end = max(self._held.rfind(b"\n"), self._held.rfind(b"\r")) + 1
            if not end and len(self._held) > HELD:
                end = len(self._held)
            if end:
                done = _Piece(self._held[:end], self._lines + 1, self).read(final=len(self._held) > HELD)
                self._lines += self._held.count(b"\n", 0, done)
                self._held = self._held[done:]

    def close(self) -> ScannedLog:
        """What was found."""
        if self._held:
            _Piece(self._held, self._lines + 1, self).read(final=True)
            self._lines += self._held.count(b"\n") + (not self._held.endswith(b"\n"))
            self._held = b""
        return ScannedLog(self._source, self._lines, list(self._streams.values()))

    def stream(self, rank: int | None) -> StreamFindings:
        """The findings of a rank; ``None``: of the log itself."""
        rank = self._rank if rank is None else rank
        found = self._streams.get(rank)
        if found is None:
            if len(self._streams) >= STREAMS:
                rank = None
            found = self._streams.setdefault(rank, StreamFindings(self._source, rank))
        return found

    def rule_of(self, line: str) -> LogRule | None:
        """The rule of a cleaned line."""
        return self._matcher.rule_of(line)


class _Piece:
    """A part of a log that ends with a line."""

    def __init__(self, data: bytes, first_line: int, scanner: LogScanner) -> None:
        self._data = data
        # A progress bar ends its lines with \r alone; they are lines here, and are not counted as such.
        self._flat = data.replace(b"\r", b"\n") if b"\r" in data else data
        self._scanner = scanner
        self._at, self._line = 0, first_line
        self._consumed: set[int] = set()
        self._by_rank: dict[int | None, list[tuple[int, str]]] | None = None

    def read(self, *, final: bool) -> int:
        """Find what is there; returns how many bytes are done: less than all where a traceback goes on."""
        for start in sorted(self._starts()):
            if start in self._consumed:
                continue
            text, rank, end = self._line_at(start)
            if text.lstrip().startswith((HEADER, "Original " + HEADER)):
                if not self._traceback(start, end, text, rank, final=final):
                    return start
            else:
                self._one(start, text, rank)
        return len(self._data)

    def _starts(self) -> set[int]:
        """Where the lines begin that have a trigger."""
        lowered, flat = self._flat.lower(), self._flat
        starts = set()
        for trigger in TRIGGERS:
            at = lowered.find(trigger)
            while at >= 0:
                starts.add(flat.rfind(b"\n", 0, at) + 1)
                end = flat.find(b"\n", at)
                at = lowered.find(trigger, end) if end >= 0 else -1
        return starts

    def _line_at(self, start: int) -> tuple[str, int | None, int]:
        """A line without prefix, its rank, and where it ends."""
        end = self._flat.find(b"\n", start)
        end = len(self._flat) if end < 0 else end
        raw = self._flat[start:end] if end - start < HELD else self._flat[start : start + HELD]
        line = clean(raw.decode(errors="replace"))
        text, rank = without_prefix(line)
        return text, rank, end

    def _number(self, start: int) -> int:
        """The number of the line at a place; places that follow one another are quick."""
        if start >= self._at:
            self._line += self._data.count(b"\n", self._at, start)
            self._at = start
            return self._line
        return self._line - self._data.count(b"\n", start, self._at)

    def _time(self, start: int, end: int) -> float | None:
        """The time of a line, or of the last line before it that has one."""
        own = time_of(self._flat[start:end][:200].decode(errors="replace"))
        if own is not None:
            return own
        before = self._flat[max(0, start - LOOK_BACK) : start].decode(errors="replace").split("\n")
        return next((found for line in reversed(before) if (found := time_of(line)) is not None), None)

    def _one(self, start: int, text: str, rank: int | None) -> None:
        """A line that is no part of a traceback."""
        stripped = text.strip()
        if stripped.startswith(CHAINED):
            self._scanner.stream(rank).linked = True
            return
        rule = self._scanner.rule_of(text)
        name = exception_name(text)
        raised = name.endswith(("Error", "Exception")) or (name != "" and "." in name and rule is not None)
        if rule is None and not raised:
            return
        end = start + len(text)
        number, time = self._number(start), self._time(start, max(end, start))
        if rank is None:
            rank = rank_in(text)
        goes_on = says_it_goes_on(self._flat[max(0, start - 1) : start + SHOWN].decode(errors="replace").strip().split("\n")[0])
        if raised:
            self._scanner.stream(rank).raised(
                RaisedException(number, text[:SHOWN], rule, goes_on=goes_on, time=time)
            )
        elif rule is not None:
            weight = Weight.WEAK if goes_on and rule.weight < Weight.DECISIVE else rule.weight
            self._scanner.stream(rank).hit(LogHit(rule, number, stripped[:SHOWN], weight, time))

    def _traceback(self, start: int, end: int, header: str, rank: int | None, *, final: bool) -> bool:
        """Read a traceback to the line that names its exception; False: it goes on in the next piece."""
        lines = self._lines_of(start, rank)
        place = bisect_left(lines, (end + 1,))
        block: list[str] = []
        named = -1
        for number in range(place, min(place + BLOCK_LINES, len(lines))):
            text = lines[number][1]
            if not text[0].isspace() and exception_line(text):
                named = number
                break
            block.append(text)
        # Its message may have more lines, and the next exception of a chain follows.
        short = len(lines) - place < BLOCK_LINES and (named < 0 or len(lines) - named < MESSAGE_LINES)
        if short and not final and len(self._flat) < HELD:
            return False
        self._consumed.add(start)
        if named < 0:
            return True
        at, text = lines[named]
        message = _message(lines, named + 1)
        rule = self._best(text, message)
        self._consumed.update(begin for begin, _ in lines[place : named + 1 + len(message)])
        stream = self._scanner.stream(rank)
        stream.before_last = header.lstrip().startswith("Original")
        shown = text if rule is None or self._scanner.rule_of(text) is rule else _with(text, message, rule, self._scanner)
        stream.raised(
            RaisedException(self._number(at), shown[:SHOWN], rule, block, time=self._time(start, start + SHOWN))
        )
        return True

    def _lines_of(self, start: int, rank: int | None) -> list[tuple[int, str]]:
        """Where the lines of a rank begin, and their texts, blank ones left out; from a place on."""
        if self._by_rank is None:
            self._by_rank = defaultdict(list)
            at = start
            while at < len(self._flat):
                text, of, end = self._line_at(at)
                if text.strip():
                    self._by_rank[of].append((at, text))
                at = end + 1
        return self._by_rank[rank]

    def _best(self, text: str, message: Iterable[str]) -> LogRule | None:
        """The rule of an exception: of its first line, unless that says little."""
        own = self._scanner.rule_of(text)
        if own is not None and own.name not in GENERAL:
            return own
        return next((rule for line in message if (rule := self._scanner.rule_of(line)) is not None), own)


GENERAL = {"nccl-system-error", "nccl-error", "nccl-internal-error", "cuda-error", "nccl-cuda-error"}
"""Rules of exceptions whose message may say more in a further line."""


def _with(text: str, message: Iterable[str], rule: LogRule, scanner: LogScanner) -> str:
    """An exception's first line with the one of its message that a rule knows."""
    return f"{text[: SHOWN // 2]} … " + next((line.strip() for line in message if scanner.rule_of(line) is rule), "")


def _message(lines: Sequence[tuple[int, str]], first: int) -> list[str]:
    """The further lines of an exception's message."""
    found: list[str] = []
    for _, text in lines[first : first + MESSAGE_LINES]:
        if HEADER in text or text.strip().startswith(CHAINED) or (not text[0].isspace() and exception_line(text)):
            break
        found.append(text)
    return found
