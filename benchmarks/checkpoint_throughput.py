"""What training loses to a save and a backup of every step, with a core to spare and without one.

Two agents on this computer: ranks on the first, backups at the second, so that one computer does what each machine
of a cluster would: it copies, sends, receives and verifies. No control plane runs. Blocks of steps with saves and
without take turns in the same processes.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.agents_side import Agents
from benchmarks.checkpoint_saves import calibrate
from benchmarks.checkpoint_training import CALM
from benchmarks.common import Row, Spread, say
from everstep.checkpoint_policy import CheckpointPolicy
from everstep.errors import EverstepError
from everstep.job import JobSpec

AIM = 0.99
SCRIPT = Path(__file__).with_name("checkpoint_training.py")
RESAMPLES = 2000
"""Of the bootstrap behind the interval (ours)."""


@dataclass(slots=True)
class Case:
    """One set-up and its blocks."""

    ranks: int
    megabytes: int
    backup: bool
    with_s: list[float] = field(default_factory=list)
    """Seconds of each block with saves, on rank 0: all ranks step together."""
    without_s: list[float] = field(default_factory=list)
    rank_cpu: float = 0.0
    """CPU seconds that a saved step costs rank 0 more than one that is not saved."""
    agents_cpu: list[float] = field(default_factory=list)
    """CPU seconds of each agent, per saved step."""
    backup_lag: list[int] = field(default_factory=list)
    """Steps between the newest save and the newest backup of each rank at the end."""
    failure: str = ""

    @property
    def name(self) -> str:
        """What it measures."""
        spare = "a core to spare" if self.ranks == 1 else "no core to spare"
        what = "save and backup" if self.backup else "save alone"
        return f"throughput, {what} of {self.megabytes} MB every step, {spare}"

    @property
    def lost(self) -> list[float]:
        """Share of the throughput that saves cost, for each pair of neighbouring blocks."""
        return [1 - without / with_ for with_, without in zip(self.with_s, self.without_s, strict=True)]

    def rows(self, steps: int) -> list[Row]:
        """Steps per second over all blocks."""
        if self.failure:
            return []
        ours, peer = (steps * len(found) / sum(found) for found in (self.with_s, self.without_s))
        return [Row(self.name, "steps/s", ours, peer, AIM if self.ranks == 1 else None, larger=True)]

    def note(self) -> str:
        """How certain the loss is, and the CPU time behind it."""
        if self.failure:
            return f"{self.name}: {self.failure}"
        low, high = interval(self.with_s, self.without_s)
        spread = Spread.of(self.lost)
        agents = " and ".join(f"{one:.3f}" for one in self.agents_cpu)
        behind = f"; backups behind by {self.backup_lag} steps at the end" if self.backup else ""
        return (
            f"{self.name}: lost {_lost(self.with_s, self.without_s):.2%}, 95% interval {low:.2%} to {high:.2%}; "
            f"pairs of blocks: median {spread.median:.2%}, p90 {spread.p90:.2%}, max {spread.maximum:.2%} of "
            f"{spread.runs}; more CPU a step: rank {self.rank_cpu:.3f} s, agents {agents} s{behind}"
        )


def _lost(with_s: Sequence[float], without_s: Sequence[float]) -> float:
    return 1 - sum(without_s) / sum(with_s)


def interval(with_s: Sequence[float], without_s: Sequence[float]) -> tuple[float, float]:
    """In what range the loss lies with a probability of 95 %, by a bootstrap over the pairs of blocks.

    What else the machine does falls on both sides alike, and only widens it.
    """
    draw = random.Random(1)
    pairs = list(zip(with_s, without_s, strict=True))
    found = sorted(_lost(*zip(*draw.choices(pairs, k=len(pairs)), strict=True)) for _ in range(RESAMPLES))
    return found[RESAMPLES // 40], found[-RESAMPLES // 40]


async def measure(cases: list[Case], *, blocks: int, steps: int) -> list[Case]:
    """Run every case; a failure leaves its place empty."""
    calls = {ranks: calibrate(ranks) for ranks in sorted({case.ranks for case in cases})}
    async with Agents() as agents:
        for number, case in enumerate(cases):
            try:
                await _run(agents, case, f"bench-{number}", calls[case.ranks], blocks=blocks, steps=steps)
            except (EverstepError, OSError) as error:
                case.failure = str(error)
            say(case.note())
    return cases


async def _run(agents: Agents, case: Case, job: str, calls: int, *, blocks: int, steps: int) -> None:
    folder = agents.folder / job
    folder.mkdir()
    spec = JobSpec(
        name=job,
        script=str(SCRIPT),
        args=[str(folder), str(case.megabytes), str(calls), str(blocks), str(steps)],
        ranks_per_machine=case.ranks,
        checkpoint=CheckpointPolicy(backup=case.backup),
    )
    before = agents.cpu_s()
    await agents.train(spec, limit_s=60 + 5.0 * blocks * (2 * steps + 4))
    found = json.loads((folder / "blocks-0.json").read_text())
    case.with_s, case.without_s = found["with"], found["without"]
    case.rank_cpu = (sum(found["cpu with"]) - sum(found["cpu without"])) / (blocks * steps)
    saved = blocks * (steps + CALM)
    case.agents_cpu = [(after - one) / saved for one, after in zip(before, agents.cpu_s(), strict=True)]
    if case.backup:
        saved_by = [one.saved for one in agents.newest]
        case.backup_lag = [one.own_step - one.backup_step for one in saved_by]
        case.failure = next((one.backup_problem for one in saved_by if one.backup_problem), "")
