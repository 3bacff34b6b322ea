"""This module has the record of a rank: its process, how it ended, and the message that reports its end."""

from __future__ import annotations

import re

from pydantic import BaseModel

from agent.launcher.processes import End
from agent.v1 import agent_pb2 as pb
from everstep.decisions.blame.classify.first_cause import classification
from everstep.model.evidence import Classification, RankExit
from everstep.rank.step_reports import Snapshot

TAIL_BYTES = 4096
"""The number of bytes of a rank's output that the report of its end contains."""

_PREFIX = re.compile(r"^\[rank\d+\]: ?")
"""The excepthook of torch.distributed puts this before every line."""
_HEADER = "Traceback (most recent call last):"
_RAISED = re.compile(r"[A-Za-z_][\w.]*(: .*)?$")
_NAMED = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Interrupt)(: .*)?$")
_MARKER = re.compile(rb"^--- everstep: rank \d+, generation (\d+),.*\n?", re.MULTILINE)


class RankRecord(BaseModel):
    """A rank of a generation that was forked on this machine."""

    rank: int
    generation: int
    pid: int
    start_ticks: int
    forked_ns: int
    end: End | None = None
    ending: End | None = None
    """How the rank is ending by itself. The agent detects and reports this while the process still exists."""
    stopped: bool = False
    """Whether the rank lived until a Stop killed it."""
    exception: str = ""
    """The line of its error output that names the exception that it raised."""
    classification: Classification | None = None
    """The class of its end; None: the rank lived until a Stop killed it, or its output was not read yet."""
    sequence: int = 0
    """Number of the observation of its end; 0: no observation is due; -1: it is due, but has no number yet."""

    @property
    def exit_code(self) -> int | None:
        """Exit code of the rank, or minus the signal that ended it; None: it runs, or its exit code is not known."""
        end = self.end or self.ending
        if end is None or end.kind == "unknown":
            return None
        return -end.value if end.kind == "signal" else end.value

    def classify(self, output: bytes) -> None:
        """Determine the exception and the class of the rank's end from the last part of its output, unless known."""
        if output and self.classification is None:
            self.exception = exception_in(output)
            if not self.stopped:
                self.classification = classification(self.exception, _log_tail(output), self.exit_code)

    def end_message(self, snapshot: Snapshot | None, output: bytes = b"") -> pb.RankEnd:
        """Return the message that reports the end.

        Args:
            snapshot: What the rank had reported; None: its report file is gone.
            output: The last part of its error output.
        """
        end = self.end or self.ending
        end_class = self.classification or (None if self.stopped else classification("", "", self.exit_code))
        return pb.RankEnd(
            rank=self.rank,
            generation=self.generation,
            pid=self.pid,
            exit=to_exit(end) if end else None,
            stopped_by_us=self.stopped,
            finished=bool(snapshot and snapshot.finished),
            completed_steps=snapshot.completed_steps if snapshot else -1,
            shown_steps=snapshot.shown_steps if snapshot else None,
            exception=self.exception,
            log_tail=_log_tail(output),
            classification=pb.Classification(**end_class.model_dump()) if end_class else None,
        )


def to_exit(end: End) -> pb.Exit:
    """Convert an end to a message."""
    kinds = {"code": pb.Exit.CODE, "signal": pb.Exit.SIGNAL, "unknown": pb.Exit.UNKNOWN}
    return pb.Exit(kind=kinds[end.kind], value=end.value, time_ns=end.time_ns)


def exit_of(machine: str, end: pb.RankEnd, *, shift_ns: int = 0) -> RankExit:
    """Convert the message about a rank's end, which comes from an observation or from the answer to a Stop.

    ``shift_ns`` is added to the machine's time to get the caller's time.
    """
    known = end.classification
    return RankExit(
        rank=end.rank,
        machine=machine,
        pid=end.pid,
        code=code_of(end.exit),
        signal=end.exit.value if end.exit.kind == pb.Exit.SIGNAL else None,
        time_ns=end.exit.time_ns + shift_ns if end.exit.time_ns else 0,
        stopped_by_us=end.stopped_by_us,
        completed_steps=end.completed_steps,
        exception=end.exception,
        log_tail=end.log_tail,
        shown_steps=end.shown_steps if end.HasField("shown_steps") else -1,
        classification=Classification(
            fault=known.fault,
            owner=known.owner,
            reason=known.reason,
            consequence=known.consequence,
            place=known.place,
            evidence=list(known.evidence),
        )
        if end.HasField("classification")
        else None,
    )


def code_of(end: pb.Exit) -> int | None:
    """Return the exit code; None: the rank ended in another way, or the code is not known."""
    return end.value if end.kind == pb.Exit.CODE else None


def _log_tail(output: bytes) -> str:
    return output[-TAIL_BYTES:].decode(errors="replace")


def of_generation(output: bytes, generation: int) -> bytes:
    """Return the part of a rank's error output that a generation wrote."""
    marks = list(_MARKER.finditer(output))
    for number, mark in enumerate(marks):
        if int(mark[1]) == generation:
            end = marks[number + 1].start() if number + 1 < len(marks) else len(output)
            return output[mark.end() : end]
    # The generation's marker is not in this output. Without any marker, all of the output belongs to the generation.
    return b"" if marks else output


def exception_in(output: bytes) -> str:
    """Return the line that names the exception of the last traceback, e.g. ``ValueError: bad``; empty: there is none.

    If the message begins on the line after the exception's name, the result contains both.
    """
    lines = [_PREFIX.sub("", line) for line in output.decode(errors="replace").splitlines()]
    headers = [number for number, line in enumerate(lines) if line.strip() == _HEADER]
    if headers:
        raised = (at for at in range(headers[-1] + 1, len(lines)) if _RAISED.match(lines[at]))
    else:
        # Python prints no header if there is no frame to show: the script is missing, or is not valid Python.
        raised = (at for at in reversed(range(len(lines))) if _NAMED.match(lines[at]))
    if (at := next(raised, None)) is None:
        return ""
    line = lines[at].rstrip()
    if line.endswith(":"):
        line = f"{line} {next((more.strip() for more in lines[at + 1 :] if more.strip()), '')}".rstrip()
    return line[:500]
