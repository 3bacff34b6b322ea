"""What training loses to a save and a backup of every step, with a core to spare and without one.

Two agents on this computer: ranks on the first, backups at the second, so that one computer does what each machine
of a cluster would: it copies, sends, receives and verifies. No control plane runs. Blocks of steps with saves and
without take turns in the same processes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.agents_side import Agents
from benchmarks.checkpoint_saves import calibrate
from benchmarks.common import Row, Spread, say
from everstep.errors import EverstepError

AIM = 0.99
SCRIPT = Path(__file__).with_name("checkpoint_training.py")


@dataclass(slots=True)
class Case:
    """One set-up and its blocks."""

    ranks: int
    megabytes: int
    backup: bool
    with_s: list[float] = field(default_factory=list)
    """Seconds of each block with saves, on rank 0: all ranks step together."""
    without_s: list[float] = field(default_factory=list)
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
    def ratios(self) -> list[float]:
        """Throughput with by without, for each pair of neighbouring blocks."""
        return [without / with_ for with_, without in zip(self.with_s, self.without_s, strict=True)]

    def rows(self, steps: int) -> list[Row]:
        """Steps per second over all blocks."""
        if self.failure:
            return []
        ours, peer = (steps * len(found) / sum(found) for found in (self.with_s, self.without_s))
        return [Row(self.name, "steps/s", ours, peer, AIM if self.ranks == 1 else None, larger=True)]

    def note(self) -> str:
        """The spread of the pairs of blocks, and what the agents used."""
        if self.failure:
            return f"{self.name}: {self.failure}"
        spread = Spread.of([1 - ratio for ratio in self.ratios])
        agents = " and ".join(f"{one:.3f}" for one in self.agents_cpu)
        behind = f"; backups behind by {self.backup_lag} steps at the end" if self.backup else ""
        return (
            f"{self.name}: lost {spread.median:.2%} (median of {spread.runs} pairs of blocks), p90 {spread.p90:.2%}, "
            f"max {spread.maximum:.2%}; agents {agents} CPU s a step{behind}"
        )


async def measure(cases: list[Case], *, blocks: int, steps: int) -> list[Case]:
    """Run every case; a failure leaves its place empty."""
    calls = {ranks: calibrate(ranks) for ranks in {case.ranks for case in cases}}
    async with Agents() as agents:
        for number, case in enumerate(cases):
            folder = agents.folder / f"case-{number}"
            folder.mkdir()
            args = [str(folder), str(case.megabytes), str(calls[case.ranks]), str(blocks), str(steps)]
            used = agents.cpu_s()
            try:
                await agents.train(
                    SCRIPT,
                    args,
                    job=f"bench-{number}",
                    ranks=case.ranks,
                    backup=case.backup,
                    limit_s=60 + 5.0 * blocks * (2 * steps + 4),
                )
                found = json.loads((folder / "blocks-0.json").read_text())
            except (EverstepError, OSError) as error:
                case.failure = str(error)
                say(case.note())
                continue
            case.with_s, case.without_s = found["with"], found["without"]
            saved = blocks * (steps + 2)
            case.agents_cpu = [(after - before) / saved for before, after in zip(used, agents.cpu_s(), strict=True)]
            if case.backup:
                saved_by = [one.saved for one in agents.newest]
                case.backup_lag = [one.own_step - one.backup_step for one in saved_by]
                if problem := next((one.backup_problem for one in saved_by if one.backup_problem), ""):
                    case.failure = problem
            say(case.note())
    return cases
