"""The candidates for the cause of a failure in one stream of lines, the most likely first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from everstep.decisions.blame.classify.rule import FaultClass, LogRule, Weight
from everstep.decisions.blame.classify.streams import LogHit, RaisedException, ScannedLog, StreamFindings
from everstep.decisions.blame.classify.tracebacks import Frame, user_frame
from everstep.model.finding import Owner
from everstep.system.signals import signal_name

SHELL_SIGNALS = 128
"""Added to a signal's number by shells, containers and Slurm."""
LAST_SIGNAL = 64


@dataclass(frozen=True, slots=True)
class ExitReading:
    """The meaning of an exit code in words, and its class if the logs show nothing."""

    code: int
    text: str
    fault: FaultClass
    owner: Owner
    reason: str


CODES: dict[int, tuple[str, FaultClass, Owner, str]] = {
    0: ("ended with code 0", FaultClass.NO_FAILURE, Owner.UNKNOWN, "ended-with-0"),
    2: (
        "exit code 2: of argparse and shells wrong usage, of others anything",
        FaultClass.UNKNOWN,
        Owner.UNKNOWN,
        "exit-code",
    ),
    124: ("exit code 124: a time-out of the command timeout", FaultClass.HANG, Owner.UNKNOWN, "ended-by-timeout"),
    126: ("exit code 126: the command cannot be executed", FaultClass.PERMISSION, Owner.UNKNOWN, "not-executable"),
    127: ("exit code 127: the command was not found", FaultClass.DEPENDENCY, Owner.CODE, "command-not-found"),
}
"""Codes with a meaning of their own, by the conventions of shells and of coreutils."""
SIGNALS: dict[str, tuple[str, FaultClass, str]] = {
    "SIGKILL": ("by whom is not said: the kernel, a scheduler, an agent or a person", FaultClass.KILLED, "sigkill"),
    "SIGTERM": ("asked to end, by whom is not said", FaultClass.TERMINATED, "sigterm"),
    "SIGINT": ("interrupted", FaultClass.INTERRUPTED, "interrupted"),
    "SIGABRT": ("it aborted itself: an assertion, a C++ exception, NCCL's watchdog", FaultClass.CRASHED, "sigabrt"),
    "SIGSEGV": ("segmentation fault", FaultClass.CRASHED, "fatal-python-error"),
    "SIGBUS": ("bus error: often a full /dev/shm or a lost file mapping", FaultClass.CRASHED, "fatal-python-error"),
    "SIGILL": ("illegal instruction", FaultClass.CRASHED, "fatal-python-error"),
    "SIGFPE": ("arithmetic error", FaultClass.CRASHED, "fatal-python-error"),
}


def read_exit_code(code: int) -> ExitReading:
    """Return the meaning of a code as a shell reports it (137), or as Python's subprocess does (-9)."""
    if code in CODES:
        return ExitReading(code, *CODES[code])
    number = -code if code < 0 else code - SHELL_SIGNALS
    if 0 < number <= LAST_SIGNAL:
        name = signal_name(number)
        text, fault, reason = SIGNALS.get(name, ("", FaultClass.KILLED, "ended-by-signal"))
        return ExitReading(code, f"{name}: {text}" if text else f"ended by {name}", fault, Owner.UNKNOWN, reason)
    return ExitReading(code, f"exit code {code}: the program's own", FaultClass.UNKNOWN, Owner.UNKNOWN, "exit-code")


NEAR = 200
"""Ordinary lines, for each rank of a log. So many after an exception say that the program went on, and so many
between a plain line and the last exception that it is not its cause."""
USER_EXCEPTION = LogRule(
    "user-exception",
    FaultClass.USER_EXCEPTION,
    Owner.CODE,
    (),
    r"$^",
    "Python: an exception that no rule knows",
    (),
    (),
)
"""The name that replaces a rule for an exception that no rule matches."""


@dataclass(frozen=True, slots=True)
class EvidenceLine:
    """A line of a log that is evidence."""

    source: str
    line: int
    text: str


@dataclass(frozen=True, slots=True)
class LogCandidate:
    """A possible first cause of a failure, from one stream."""

    rule: LogRule
    weight: Weight
    line: EvidenceLine
    rank: int | None
    time: float | None = None
    blocks: Sequence[Sequence[str]] = ()
    """Lines of the tracebacks of an exception, the traceback of the cause first."""
    count: int = 1

    @property
    def frame(self) -> Frame | None:
        """The frame in the user's code, if the exception, or an exception that followed from it, shows a frame."""
        return next((frame for block in self.blocks if (frame := user_frame(block))), None)

    @property
    def order(self) -> tuple[int, int]:
        """The smaller, the more it is the cause."""
        return self.rule.role, -self.weight


def candidates_of(log: ScannedLog) -> list[LogCandidate]:
    """Return the candidates of each stream, the best first: then the nearest to the beginning of the failure."""
    found: list[LogCandidate] = []
    for stream in log.streams:
        found += sorted(_of_stream(stream, log), key=lambda one: (one.order, one.line.line))
    return found


def _of_stream(stream: StreamFindings, log: ScannedLog) -> list[LogCandidate]:
    groups = list(stream.groups)
    last = groups[-1][-1].quiet if groups else 0
    # Lines of other ranks may be between the lines of a rank.
    patience = NEAR * len(log.streams)
    found = [_raised(stream, group, log.quiet - group[-1].quiet > patience) for group in groups]
    # A role alone is the same for all hits of a rule: the first one that may belong to the end stands for them.
    nearest: dict[str, LogHit] = {}
    for hit in (*stream.first.values(), *stream.recent):
        known = nearest.get(hit.rule.name)
        if known is None or _weight(hit, last - patience) > _weight(known, last - patience):
            nearest[hit.rule.name] = hit
    found += [
        LogCandidate(
            hit.rule,
            _weight(hit, last - patience),
            EvidenceLine(stream.source, hit.line, hit.text),
            stream.rank,
            hit.time,
            count=stream.counts[name],
        )
        for name, hit in nearest.items()
    ]
    return found


def _weight(hit: LogHit, since: int) -> Weight:
    """A plain line long before the last exception was survived."""
    return Weight.SURVIVED if hit.weight is Weight.PLAIN and hit.quiet < since else hit.weight


def _raised(stream: StreamFindings, group: list[RaisedException], went_on: bool) -> LogCandidate:
    """An exception with those that led to it: the first of them that a special rule knows is the cause."""
    known = [one for one in group if one.rule is not None]
    special = [one for one in known if one.rule is not None and one.rule.weight > Weight.WEAK]
    cause = (special or known or group)[0]
    # What led to a special one and is known by no rule comes first all the same: a KeyError before a closed connection.
    first = group[0]
    if first.rule is None and cause.rule is not None and cause.rule.role.is_consequence:
        cause = first
    rule = cause.rule or USER_EXCEPTION
    weight = Weight.SURVIVED if cause.goes_on or went_on else Weight.DECISIVE
    blocks = (cause.block, *(one.block for one in group if one is not cause))
    return LogCandidate(
        rule, weight, EvidenceLine(stream.source, cause.line, cause.text), stream.rank, cause.time, blocks, len(group)
    )
