"""The samples of ranks in a case's job that hangs, and the verdict of the product's analysis about the hang."""

from __future__ import annotations

import re
from dataclasses import dataclass

from drills.cases.world import Generation, World
from everstep.decisions.blame.hang.analysis import judge_hang
from everstep.decisions.blame.hang.progress import HangCheck, RankWork, check_hang
from everstep.decisions.blame.hang.rank_samples import JobSamples, RankSample
from everstep.decisions.blame.hang.stacks import Signature, StackFrame, normalise
from everstep.decisions.blame.hang.verdict import HangVerdict

WAITING = ("all_reduce (torch/distributed/distributed_c10d.py)", "step (train.py)", "<module> (train.py)")
"""The stack of a rank that waits for the others, the innermost function first."""
FRAME = re.compile(r"(?P<function>.+) \((?P<file>[^()]+)\)")


@dataclass(frozen=True, slots=True)
class Traced:
    """The verdict about a hang, and how likely it is one."""

    verdict: HangVerdict
    check: HangCheck


def trace(world: World, generation: Generation, *, is_hung: bool = False) -> Traced:
    """Return what two samples of the ranks show."""
    ranks = {rank: _sample(world, generation, rank) for rank in range(world.world_size)}
    samples = JobSamples({rank: one for rank, one in ranks.items() if one}, moved=frozenset(), is_hung=is_hung)
    verdict = judge_hang(samples, world.spec.topology(), names=generation.names)
    work = {
        rank: RankWork(1.0 if rank in generation.hung and generation.hung[rank].works else 0.0, 0)
        for rank in samples.ranks
    }
    return Traced(verdict, check_hang(verdict, samples, work))


def _sample(world: World, generation: Generation, rank: int) -> RankSample | None:
    if rank in generation.ends or world.is_silent(world.home(rank)):
        return None
    fault = generation.hung.get(rank)
    stack = WAITING if fault is None else fault.stack
    blocked_in = fault.blocked_in if fault else ""
    return RankSample(trainer=_signature(stack), blocked_in=blocked_in) if stack else RankSample()


def _signature(stack: tuple[str, ...] | list[str]) -> Signature:
    frames = [found for found in (FRAME.fullmatch(line) for line in stack) if found]
    return normalise([StackFrame(found["function"], found["file"], 1) for found in frames])
