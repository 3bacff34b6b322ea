"""How sure two looks make it that a job without steps hangs: a long phase looks like a hang at first.

The paper waits for ten minutes (section 4.1); what shortens or lengthens that is ours. Looks are at all ranks, some
time apart, while no step was seen:

- a rank is stopped (state T), or the ranks call collectives in an order that cannot work: nothing will come;
- all wait for some that do nothing: no CPU, no reads or writes. They sleep, wait for a lock, or for something outside
  of the job, which may yet come: that has its time;
- those whom all wait for work: they may be in an evaluation, a save or a loop without end. Time alone tells;
- ranks go on and nobody waits: the job computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from everstep.decisions.blame.hang.evidence import HangEvidence
from everstep.decisions.blame.hang.verdict import HangConclusion, HangMethod, HangVerdict
from everstep.decisions.blame.hang.work import RankWork


class Stillness(StrEnum):
    """Why a job has no steps, as far as two looks show it."""

    NEVER = "nothing will come"
    QUIET = "all wait for some that do nothing"
    BUSY = "all wait for some that work"
    COMPUTES = "ranks compute"
    UNKNOWN = "not known"


@dataclass(frozen=True, slots=True)
class Standstill:
    """What two looks showed of a job without steps."""

    standing: Stillness
    verdict: HangVerdict

    @property
    def text(self) -> str:
        """For people."""
        return f"{self.standing.value}: {self.verdict.reason}"


def standstill(verdict: HangVerdict, evidence: HangEvidence, work: Mapping[int, RankWork]) -> Standstill:
    """Judge how sure a hang is.

    Args:
        verdict: Over the looks.
        evidence: That it rests on.
        work: What ranks did between the looks; of who is left out it is not known.
    """
    return Standstill(_standing(verdict, evidence, work), verdict)


def _standing(verdict: HangVerdict, evidence: HangEvidence, work: Mapping[int, RankWork]) -> Stillness:
    if verdict.method is HangMethod.STATE and verdict.evicts:
        return Stillness.NEVER
    moved = bool(evidence.moved) and verdict.conclusion is HangConclusion.UNKNOWN
    if moved or verdict.conclusion is HangConclusion.NOT_HUNG:
        return Stillness.COMPUTES
    of_script = verdict.conclusion is HangConclusion.NOT_A_MACHINE
    suspects = set(work) if of_script else set(verdict.ranks) if verdict.evicts else set()
    if evidence.moved is None or not suspects or not work.keys() >= suspects:
        return Stillness.UNKNOWN
    if any(work[rank].works for rank in suspects):
        return Stillness.BUSY
    return Stillness.NEVER if of_script else Stillness.QUIET
