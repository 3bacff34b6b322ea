"""Compares ranks with their own CPU time before the job became slow, which confirms or refutes a vote.

The growth of a rank's CPU time is compared with the growth for its peers in the same pipeline stage. A rank that always
had more work than its peers shows no growth, unlike a rank on a machine that became slow. If a rank computes longer
because it gets no CPU, its machine is the cause. If a rank uses the CPU for longer, it may have more work, which only
the number of tokens can show.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median
from typing import NamedTuple

from everstep.decisions.blame.hang.outliers import stage_of
from everstep.model.topology import Topology

HALF = 0.5
"""A cause explains a decline if it accounts for at least this share of it."""
UNEVEN = 1.1
"""Two times, or two amounts of work, differ if one is at least this many times the other."""
FEWEST_PEERS = 2
"""A machine is compared only if at least this many ranks of the same stages on other machines are known."""


class Growth(StrEnum):
    """What the CPU times of a machine's ranks show."""

    NO_CPU = "no CPU"
    """The ranks compute longer than before because they get no CPU, and their peers do not."""
    SLOWER = "slower"
    """The ranks compute longer than before at the same amount of work, and their peers do not."""
    LONGER = "longer"
    """The ranks compute longer than before; whether they have more work is not known."""
    MORE_WORK = "more work"
    """The ranks compute longer than before, and have more work."""
    ALWAYS = "always"
    """The ranks compute no longer than before, and already computed longer than their peers before the decline."""
    NOT_LONGER = "not longer"
    """The ranks compute no longer than before."""
    ALL = "all"
    """The ranks' peers compute longer too."""
    UNKNOWN = "not known"

    @property
    def is_sure(self) -> bool:
        """Whether this result blames the machine for sure."""
        return self in (Growth.NO_CPU, Growth.SLOWER)


class JobGrowth(StrEnum):
    """What the CPU times of all ranks show."""

    STAGE = "a stage"
    """The ranks of one pipeline stage compute longer than before, and the other ranks do not."""
    ALL = "all"
    """Most ranks compute longer than before."""
    NONE = "none"
    """Most ranks compute no longer than before, so they wait longer."""
    UNKNOWN = "not known"


class CpuPerStep(NamedTuple):
    """The times of a rank's main thread in one step, seconds."""

    had_s: float
    """The time in which the rank had a CPU."""
    waited_s: float
    """The time in which the rank was ready to run without a CPU: other processes used it, or its quota was used up."""
    step_s: float = 0.0
    """The duration of the step; 0 if not known."""

    @property
    def busy_s(self) -> float:
        """The time in which the rank computes: with a CPU, or waiting for one."""
        return self.had_s + self.waited_s


@dataclass(frozen=True, slots=True)
class RankTimes:
    """The times of one rank for a step, now and before the decline."""

    step_s: float
    typical_step_s: float
    cpu: CpuPerStep | None
    """None: not known."""
    typical_cpu: CpuPerStep | None
    """None: not known."""
    work: float | None = None
    """The work of a step divided by the work before the decline: 1.2 is a fifth more. None: not known."""

    @property
    def grown_s(self) -> float | None:
        """The growth of the computing time of a step, seconds; None: not known."""
        return None if self.cpu is None or self.typical_cpu is None else self.cpu.busy_s - self.typical_cpu.busy_s

    @property
    def starved_s(self) -> float:
        """The growth of the time in a step in which the rank gets no CPU, seconds."""
        return 0.0 if self.cpu is None or self.typical_cpu is None else self.cpu.waited_s - self.typical_cpu.waited_s


@dataclass(frozen=True, slots=True)
class OwnPast:
    """The result of the comparison for one machine."""

    growth: Growth
    why: str
    """The reason, in words."""


def own_past(times: Mapping[int, RankTimes], machine: int, topology: Topology) -> OwnPast:
    """Compare the ranks of a machine with their own past, and with the past of their peers.

    Args:
        times: The times of each known rank.
        machine: The number of the machine.
        topology: The topology of the job.
    """
    ranks = [rank for rank in topology.ranks(machine) if rank in times]
    own = [rank for rank in ranks if times[rank].grown_s is not None]
    stages = {stage_of(rank, topology) for rank in topology.ranks(machine)}
    others = _known(times, (rank for rank in times if topology.machine(rank) != machine))
    peers = [rank for rank in others if stage_of(rank, topology) in stages]
    lost_s = decline_s(times)
    if len(own) * 2 < len(topology.ranks(machine)) or len(peers) < FEWEST_PEERS or lost_s <= 0:
        return OwnPast(Growth.UNKNOWN, "how long its ranks compute, now and before, is not known")
    grown, of_peers = _grown_s(times, own), _grown_s(times, peers)
    steps = f"steps take {1000 * lost_s:.0f} ms more"
    if grown < HALF * lost_s:
        return _not_longer(times, own, peers, steps)
    if of_peers > HALF * grown or _in_proportion(times, own, peers):
        return OwnPast(Growth.ALL, f"its peers compute longer too: {1000 * of_peers:.0f} ms a step; {steps}")
    why = f"its ranks compute {1000 * grown:.0f} ms longer in a step, their peers {1000 * of_peers:.0f} ms; {steps}"
    return _longer(times, own, grown, why)


def _in_proportion(times: Mapping[int, RankTimes], own: Sequence[int], peers: Sequence[int]) -> bool:
    """Return whether the peers' computing time grew by about the same factor as these ranks' time, or by more."""
    before, usual = _typical_s(times, own), _typical_s(times, peers)
    if before <= 0 or usual <= 0:
        return False
    return _grown_s(times, own) / before <= UNEVEN * _grown_s(times, peers) / usual


def _longer(times: Mapping[int, RankTimes], own: Sequence[int], grown: float, why: str) -> OwnPast:
    """Return the result for ranks that compute longer than before, unlike their peers."""
    starved = median(times[rank].starved_s for rank in own)
    if starved >= HALF * grown:
        return OwnPast(Growth.NO_CPU, f"{why}; for {1000 * starved:.0f} ms of this they get no CPU")
    work = [ratio for rank in own if (ratio := times[rank].work) is not None]
    if len(work) < len(own):
        return OwnPast(Growth.LONGER, f"{why}; whether they have more work is not known: not all of them report tokens")
    if median(work) >= UNEVEN:
        return OwnPast(Growth.MORE_WORK, f"{why}; they have {100 * (median(work) - 1):.0f} % more tokens than before")
    return OwnPast(Growth.SLOWER, f"{why}; they have no more tokens than before")


def _not_longer(times: Mapping[int, RankTimes], own: Sequence[int], peers: Sequence[int], steps: str) -> OwnPast:
    before, usual = _typical_s(times, own), _typical_s(times, peers)
    step_s = median(times[rank].typical_step_s for rank in own)
    if before >= UNEVEN * usual and before - usual >= (UNEVEN - 1) * step_s:
        return OwnPast(
            Growth.ALWAYS,
            f"its ranks compute no longer than before, when they computed {1000 * before:.0f} ms in a step and their "
            f"peers {1000 * usual:.0f} ms: they have more work in the job, or the machine was already slow",
        )
    return OwnPast(Growth.NOT_LONGER, f"its ranks compute no longer than before; {steps}")


def job_growth(times: Mapping[int, RankTimes], topology: Topology) -> tuple[JobGrowth, str]:
    """Compare all ranks with their own past, and return the result and its reason."""
    known, lost_s = _known(times, times), decline_s(times)
    if len(known) * 2 < topology.world_size or lost_s <= 0:
        return JobGrowth.UNKNOWN, "how long most ranks compute, now and before, is not known"
    stages: dict[int, list[int]] = defaultdict(list)
    for rank in known:
        stages[stage_of(rank, topology)].append(rank)
    by_stage = sorted(((_grown_s(times, ranks), stage) for stage, ranks in stages.items()), reverse=True)
    most, grown = by_stage[0][0], _grown_s(times, known)
    steps = f"steps take {1000 * lost_s:.0f} ms more"
    if len(by_stage) > 1 and most >= HALF * lost_s and by_stage[1][0] <= HALF * most:
        stage = topology.coordinate(stages[by_stage[0][1]][0]).pp
        return JobGrowth.STAGE, f"all ranks of stage {stage} compute {1000 * most:.0f} ms longer than before; {steps}"
    if grown >= HALF * lost_s:
        return JobGrowth.ALL, f"most ranks compute {1000 * grown:.0f} ms longer in a step than before; {steps}"
    return JobGrowth.NONE, f"most ranks compute no longer than before; {steps}: they wait longer for each other"


def decline_s(times: Mapping[int, RankTimes]) -> float:
    """Return how much longer a step lasts than before, seconds; 0 if not known."""
    known = [timing.step_s - timing.typical_step_s for timing in times.values() if timing.typical_step_s > 0]
    return median(known) if known else 0.0


def _known(times: Mapping[int, RankTimes], ranks: Iterable[int]) -> list[int]:
    return [rank for rank in ranks if times[rank].grown_s is not None]


def _grown_s(times: Mapping[int, RankTimes], ranks: Collection[int]) -> float:
    return median(times[rank].grown_s or 0.0 for rank in ranks)


def _typical_s(times: Mapping[int, RankTimes], ranks: Collection[int]) -> float:
    return median(cpu.busy_s for rank in ranks if (cpu := times[rank].typical_cpu) is not None)
