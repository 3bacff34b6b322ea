"""Judges from two samples of all ranks how likely it is that a job without steps hangs: a long phase looks like a hang.

The samples show one of these (``HangSign``):

- A rank is stopped (state T), or the ranks call collectives in an order that cannot work. The job will never continue.
- All ranks wait for ranks that do nothing: these use no CPU, and neither read nor write. They sleep, or wait for a lock
  or for something outside of the job. The job gets some time to continue.
- All ranks wait for ranks that work: these may be in an evaluation, a save or an endless loop. The job gets more time.
- All ranks wait for ranks that wait for something outside of the job, e.g. for the answer of a server. The job gets as
  much time.
- Ranks progress, and no rank waits: the job computes.

ByteRobust waits for ten minutes in any case (section 4.1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from everstep.decisions.blame.hang.rank_samples import JobSamples, ProcessSample
from everstep.decisions.blame.hang.verdict import HangVerdict
from everstep.model.hang import HangConclusion, HangMethod

WORKS = 0.3
"""A rank works if its processes use or wait for at least this share of one CPU."""
IO_BYTES = 64 << 10
"""A rank also works if it reads or writes at least this many bytes between two samples."""

HELD = ("D", "t")
"""A rank also works if a process is in one of these states in both samples. In state D it waits for a disk or a mount,
for example in a long ``fsync`` of a checkpoint; in state t a debugger has stopped it."""
SWITCHES = 20.0
"""A rank also works if its threads wait and resume at least this often in a second: it sends, receives or polls."""


class RankWork(NamedTuple):
    """The activity of the processes of one rank between two samples."""

    share: float
    """The share of one CPU that the processes used or waited for; an endless loop has 1."""
    io_bytes: int
    switches: float = 0.0
    """The number of times per second that threads waited and resumed."""
    is_held: bool = False
    """A process of the rank waited in the kernel, or was stopped by a debugger, in both samples."""

    @property
    def works(self) -> bool:
        """Whether the rank works."""
        return self.is_held or self.share >= WORKS or self.io_bytes >= IO_BYTES or self.switches >= SWITCHES


def work_of(first: JobSamples, last: JobSamples, seconds: float) -> Mapping[int, RankWork]:
    """Return the activity of each rank between two samples; ranks without a process in both samples are left out.

    Args:
        first: The first sample.
        last: The last sample.
        seconds: The time between the samples.
    """
    work: dict[int, RankWork] = {}
    for rank, sample in last.ranks.items() if seconds > 0 else ():
        before = {process.pid: process for process in first.of(rank).processes}
        pairs = [(before[now.pid], now) for now in sample.processes if now.pid in before]
        if pairs:
            work[rank] = _work(pairs, seconds)
    return work


def _work(pairs: Sequence[tuple[ProcessSample, ProcessSample]], seconds: float) -> RankWork:
    """Return the activity of a rank from its processes, each in the first and in the last sample."""
    share, io_bytes, switches, is_held = 0.0, 0, 0, False
    for then, now in pairs:
        share += max(now.cpu_s - then.cpu_s + now.waited_s - then.waited_s, 0.0)
        if min(now.io_bytes, then.io_bytes) >= 0:
            io_bytes += max(now.io_bytes - then.io_bytes, 0)
        switches += max(now.switches - then.switches, 0)
        is_held = is_held or (now.state in HELD and then.state in HELD)
    return RankWork(share / seconds, io_bytes, switches / seconds, is_held)


class HangSign(StrEnum):
    """Why a job does not step, as far as two samples show it."""

    NEVER = "the job will never continue"
    QUIET = "all ranks wait for ranks that do nothing"
    BUSY = "all ranks wait for ranks that work"
    OUTSIDE = "all ranks wait for ranks that wait for something outside of the job"
    COMPUTES = "ranks compute"
    UNKNOWN = "not known"


@dataclass(frozen=True, slots=True)
class HangCheck:
    """The result of two samples of a job without steps."""

    sign: HangSign
    verdict: HangVerdict

    @property
    def text(self) -> str:
        """The result in words."""
        return f"{self.sign.value}: {self.verdict.reason}"


def check_hang(verdict: HangVerdict, samples: JobSamples, work: Mapping[int, RankWork]) -> HangCheck:
    """Judge how likely a hang is.

    Args:
        verdict: The verdict of the analysis of both samples.
        samples: The samples that the verdict is based on.
        work: The activity of ranks between the samples; a missing rank's activity is not known.
    """
    return HangCheck(_sign(verdict, samples, work), verdict)


def _sign(verdict: HangVerdict, samples: JobSamples, work: Mapping[int, RankWork]) -> HangSign:
    if verdict.method is HangMethod.STATE and verdict.evicts:
        return HangSign.NEVER
    if verdict.is_outside and samples.moved is not None:
        return HangSign.OUTSIDE
    moves = bool(samples.moved) and verdict.conclusion is HangConclusion.UNKNOWN
    if moves or verdict.conclusion is HangConclusion.NOT_HUNG:
        return HangSign.COMPUTES
    of_script = verdict.conclusion is HangConclusion.NOT_A_MACHINE
    suspects = set(work) if of_script else set(verdict.ranks) if verdict.evicts else set()
    if samples.moved is None or not suspects or not work.keys() >= suspects:
        return HangSign.UNKNOWN
    if any(work[rank].works for rank in suspects):
        return HangSign.BUSY
    return HangSign.NEVER if of_script else HangSign.QUIET
