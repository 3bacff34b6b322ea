"""Finds the candidates for the first cause of a failure: lines of a log that may show it, and the exit code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from everstep.base.text import signal_name
from everstep.decisions.blame.classify.rule import FaultClass, LogRule, Weight
from everstep.decisions.blame.classify.streams import LogHit, RaisedException, ScannedLog, StreamFindings
from everstep.decisions.blame.classify.tracebacks import Frame, user_frame
from everstep.model.finding import Owner

SHELL_SIGNALS = 128
"""Shells, containers and Slurm report the signal number plus this as the exit code."""
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
        "exit code 2: wrong usage, if argparse or a shell chose it",
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
    "SIGKILL": ("the kernel, a scheduler, an agent or a person may have sent it", FaultClass.KILLED, "sigkill"),
    "SIGTERM": ("asked to end; the code does not show by whom", FaultClass.TERMINATED, "sigterm"),
    "SIGINT": ("interrupted", FaultClass.INTERRUPTED, "interrupted"),
    "SIGABRT": ("it aborted itself: an assertion, a C++ exception, NCCL's watchdog", FaultClass.CRASHED, "sigabrt"),
    "SIGSEGV": ("segmentation fault", FaultClass.CRASHED, "fatal-python-error"),
    "SIGBUS": ("bus error: often a full /dev/shm or a lost file mapping", FaultClass.CRASHED, "fatal-python-error"),
    "SIGILL": ("illegal instruction", FaultClass.CRASHED, "fatal-python-error"),
    "SIGFPE": ("arithmetic error", FaultClass.CRASHED, "fatal-python-error"),
}


def read_exit_code(code: int) -> ExitReading:
    """Return the meaning of an exit code, in the form of a shell (137) or of Python's subprocess (-9)."""
    if code in CODES:
        return ExitReading(code, *CODES[code])
    number = -code if code < 0 else code - SHELL_SIGNALS
    if 0 < number <= LAST_SIGNAL:
        name = signal_name(number)
        text, fault, reason = SIGNALS.get(name, ("", FaultClass.KILLED, "ended-by-signal"))
        return ExitReading(code, f"{name}: {text}" if text else f"ended by {name}", fault, Owner.UNKNOWN, reason)
    return ExitReading(code, f"exit code {code}, chosen by the program", FaultClass.UNKNOWN, Owner.UNKNOWN, "exit-code")


NEAR = 200
"""Number of ordinary lines, per rank of a log, after which the program has continued. The program survived an exception
if more lines follow it. It survived a plain hit if more lines lie between the hit and the last exception."""
RETRIES_NEAR = 20
"""The same number for lines of a client that tries again: they show a cause only if they are right before the end."""
STEPS_AFTER = 50
"""If at least this many reports of steps follow a hit, the training continued, so the program survived the hit. Few
reports are not enough: some loggers report a step twice in a line, and in some logs each rank reports it."""
USER_EXCEPTION = LogRule(
    "user-exception",
    FaultClass.USER_EXCEPTION,
    Owner.CODE,
    hints="",
    pattern=r"$^",
    source="Python",
    matches=(),
    misses=(),
)
"""The rule that stands for an exception that no other rule matches."""


@dataclass(frozen=True, slots=True)
class EvidenceLine:
    """A line of a log that supports a verdict."""

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
    """The tracebacks of a chain of exceptions, as lines; the traceback of the cause is first."""
    count: int = 1

    @property
    def frame(self) -> Frame | None:
        """The frame in the user's code, from the first traceback that has such a frame."""
        return next((frame for block in self.blocks if (frame := user_frame(block))), None)

    @property
    def order(self) -> tuple[int, int]:
        """A sort key: the most likely cause has the smallest key."""
        return self.rule.role, -self.weight


def candidates_of(log: ScannedLog) -> list[LogCandidate]:
    """Return the candidates of each stream, the most likely cause first; equal candidates are in order of lines."""
    candidates: list[LogCandidate] = []
    for stream in log.streams:
        candidates += sorted(_of_stream(stream, log), key=lambda candidate: (candidate.order, candidate.line.line))
    return candidates


def _of_stream(stream: StreamFindings, log: ScannedLog) -> list[LogCandidate]:
    chains = list(stream.chains)
    # Lines of other ranks may be between the lines of a rank.
    near = NEAR * len(log.streams)
    candidates = [_of_chain(stream, chain, log.ordinary - chain[-1].ordinary_before > near) for chain in chains]
    since = chains[-1][-1].ordinary_before - near if chains else -near
    until = log.steps - STEPS_AFTER
    end = chains[-1][-1].ordinary_before if chains else log.ordinary
    repeated = Counter(
        hit.rule.name
        for hit in stream.recent
        if hit.weight > Weight.SURVIVED and hit.ordinary_before >= end - RETRIES_NEAR * len(log.streams)
    )
    strongest: dict[str, LogHit] = {}
    for found in (*stream.first.values(), *stream.recent):
        enough = found.rule.times == 1 or repeated[found.rule.name] >= found.rule.times
        hit = found if enough else replace(found, weight=Weight.SURVIVED)
        earlier = strongest.get(hit.rule.name)
        if earlier is None or _weight(hit, since, until) > _weight(earlier, since, until):
            strongest[hit.rule.name] = hit
    candidates += [
        LogCandidate(
            hit.rule,
            _weight(hit, since, until),
            EvidenceLine(stream.source, hit.line, hit.text),
            stream.rank,
            hit.time,
            count=stream.counts[name],
        )
        for name, hit in strongest.items()
    ]
    return candidates


def _weight(hit: LogHit, since: int, until: int) -> Weight:
    """Return the weight of a hit.

    The program survived a plain hit if fewer than ``since`` ordinary lines precede it, because many more lines follow
    it in that case. The program survived any hit that is not decisive if at most ``until`` reports of steps precede it,
    because many more reports follow it in that case.
    """
    continued = hit.weight is Weight.PLAIN and hit.ordinary_before < since
    stepped = hit.weight < Weight.DECISIVE and hit.steps_before <= until
    return Weight.SURVIVED if continued or stepped else hit.weight


def _of_chain(stream: StreamFindings, chain: list[RaisedException], continued: bool) -> LogCandidate:
    """Return the cause of a chain of exceptions: the first exception that matches a rule that is stronger than weak.

    Args:
        stream: The stream of the exceptions.
        chain: The exceptions, the first cause first.
        continued: The program continued after the last of them.
    """
    strong = [raised for raised in chain if raised.rule is not None and raised.rule.weight > Weight.WEAK]
    cause = (strong or chain)[0]
    # An exception of the script counts more than a consequence: a KeyError may lead to a closed connection.
    if chain[0].rule is None and cause.rule is not None and cause.rule.role.is_consequence:
        cause = chain[0]
    rule = cause.rule or USER_EXCEPTION
    weight = Weight.SURVIVED if cause.retried or continued else Weight.DECISIVE
    blocks = (cause.block, *(raised.block for raised in chain if raised is not cause))
    return LogCandidate(
        rule, weight, EvidenceLine(stream.source, cause.line, cause.text), stream.rank, cause.time, blocks, len(chain)
    )
