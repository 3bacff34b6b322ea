"""How sure two samples make it that a job without steps hangs: a long phase looks like a hang at first.

The paper waits for ten minutes (section 4.1); what shortens or lengthens that is ours. Samples are of all ranks, some
time apart, while no step was seen:

- a rank is stopped (state T), or the ranks call collectives in an order that cannot work: nothing will happen any more;
- all wait for some that do nothing: no CPU, no reads or writes. They sleep, wait for a lock, or for something outside
  of the job, which may yet happen: they get some time for it;
- those for whom all wait are working: they may be in an evaluation, a save or an endless loop. Only time tells;
- ranks progress and none waits: the job computes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from everstep.decisions.blame.hang.rank_samples import JobSamples
from everstep.decisions.blame.hang.verdict import HangVerdict
from everstep.model.hang import HangConclusion, HangMethod

WORKS = 0.3
"""A rank works if it uses, or waits for, at least this share of one CPU; on a shared CPU it may get little."""
IO_BYTES = 64 << 10
"""A rank also works if it reads or writes at least this many bytes between two samples."""


HELD = ("D", "t")
"""States of a process that the kernel holds up in both samples: it waits for a disk or a mount, as in one long write or
``fsync`` of a checkpoint, which uses up nothing; or a debugger holds it."""

SWITCHES = 20.0
"""A rank also works if its threads wait and run again at least this often in a second: it sends, receives or polls."""


class UsedUp(NamedTuple):
    """The resources that one process of a rank has used since it began."""

    rank: int
    pid: int
    cpu_s: float
    waited_s: float
    """Time in which it could have run and had no CPU."""
    io_bytes: int
    """Read and written; -1: not known."""
    switches: int = 0
    """How often the threads of the process waited and resumed."""
    state: str = ""
    """The state of the first thread of the process, one letter; empty: not known."""


class RankWork(NamedTuple):
    """The activity of the processes of one rank between two samples."""

    share: float
    """The share of one CPU that the processes had or waited for; 1 is an endless loop."""
    io_bytes: int
    switches: float = 0.0
    """A second."""
    is_held: bool = False
    """A process of the rank waited in the kernel, or was held by a debugger, in both samples."""

    @property
    def works(self) -> bool:
        """Whether the rank works, or is held by the kernel or a debugger."""
        return self.is_held or self.share >= WORKS or self.io_bytes >= IO_BYTES or self.switches >= SWITCHES


def work_of(first: Iterable[UsedUp], last: Iterable[UsedUp], seconds: float) -> Mapping[int, RankWork]:
    """What each rank did; those that were not seen twice are left out.

    Args:
        first: What its processes had used up in the first sample.
        last: The same in the last sample; ``pid`` is of one machine, and so of one rank.
        seconds: Between the two.
    """
    before = {(one.rank, one.pid): one for one in first}
    found: dict[int, RankWork] = {}
    for now in last:
        then = before.get((now.rank, now.pid))
        if then is None or seconds <= 0:
            continue
        share = (now.cpu_s - then.cpu_s + now.waited_s - then.waited_s) / seconds
        moved = now.io_bytes - then.io_bytes if min(now.io_bytes, then.io_bytes) >= 0 else 0
        so_far = found.get(now.rank, RankWork(0.0, 0))
        switches = so_far.switches + max(now.switches - then.switches, 0) / seconds
        is_held = so_far.is_held or (now.state in HELD and then.state in HELD)
        found[now.rank] = RankWork(so_far.share + max(share, 0.0), so_far.io_bytes + max(moved, 0), switches, is_held)
    return found


class HangSign(StrEnum):
    """Why a job has no steps, as far as two samples show it."""

    NEVER = "nothing will happen"
    QUIET = "all wait for some that do nothing"
    BUSY = "all wait for some that work"
    COMPUTES = "ranks compute"
    UNKNOWN = "not known"


@dataclass(frozen=True, slots=True)
class HangCheck:
    """The result of two samples of a job without steps."""

    sign: HangSign
    verdict: HangVerdict

    @property
    def text(self) -> str:
        """Text for people."""
        return f"{self.sign.value}: {self.verdict.reason}"


def check_hang(verdict: HangVerdict, evidence: JobSamples, work: Mapping[int, RankWork]) -> HangCheck:
    """Judge how sure a hang is.

    Args:
        verdict: Of the analysis of both samples.
        evidence: That it rests on.
        work: What ranks did between the samples; of a rank that is left out it is not known.
    """
    return HangCheck(_sign(verdict, evidence, work), verdict)


def _sign(verdict: HangVerdict, evidence: JobSamples, work: Mapping[int, RankWork]) -> HangSign:
    if verdict.method is HangMethod.STATE and verdict.evicts:
        return HangSign.NEVER
    moved = bool(evidence.moved) and verdict.conclusion is HangConclusion.UNKNOWN
    if moved or verdict.conclusion is HangConclusion.NOT_HUNG:
        return HangSign.COMPUTES
    of_script = verdict.conclusion is HangConclusion.NOT_A_MACHINE
    suspects = set(work) if of_script else set(verdict.ranks) if verdict.evicts else set()
    if evidence.moved is None or not suspects or not work.keys() >= suspects:
        return HangSign.UNKNOWN
    if any(work[rank].works for rank in suspects):
        return HangSign.BUSY
    return HangSign.NEVER if of_script else HangSign.QUIET
