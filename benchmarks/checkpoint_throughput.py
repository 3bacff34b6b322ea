"""Measures how much a save and a backup of every step slow training down, with and without a spare core.

Two agents run on this computer, without a control plane: the first has the ranks, and the second their backups. So this
computer does what each machine of a cluster does: it copies, sends, receives and verifies. Blocks of steps with saves
and without saves take turns in the same processes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.agents_side import Agents
from benchmarks.blocks import fastest, interval, mean
from benchmarks.checkpoint_saves import calibrate
from benchmarks.checkpoint_training import CALM
from benchmarks.common import Row, say
from everstep.errors import EverstepError
from everstep.model.checkpoint_policy import CheckpointPolicy
from everstep.model.job import JobSpec

AIM = 0.99
SCRIPT = Path(__file__).with_name("checkpoint_training.py")


@dataclass(slots=True)
class Case:
    """One case and its blocks of steps."""

    ranks: int
    megabytes: int
    backup: bool
    with_s: list[list[float]] = field(default_factory=list)
    """Seconds of each step with a save, block by block; those of rank 0, since all ranks step together."""
    without_s: list[list[float]] = field(default_factory=list)
    rank_cpu: float = 0.0
    """Additional CPU seconds of rank 0 in a step with a save."""
    agents_cpu: list[float] = field(default_factory=list)
    """CPU seconds of each agent, per saved step."""
    backup_lag: list[int] = field(default_factory=list)
    """For each rank: the number of steps by which its newest backup is behind its newest save at the end."""
    failure: str = ""

    @property
    def name(self) -> str:
        """The name of the case."""
        spare = "a core to spare" if self.ranks == 1 else "no core to spare"
        what = "save and backup" if self.backup else "save alone"
        return f"throughput, {what} of {self.megabytes} MB every step, {spare}"

    def rows(self) -> list[Row]:
        """Return rows with the steps per second, of the fastest steps and of all steps."""
        if self.failure:
            return []
        aim = AIM if self.ranks == 1 else None
        found = []
        for label, of in ((": fastest tenth", fastest), (": all", mean)):
            ours, peer = 1 / of(self.with_s), 1 / of(self.without_s)
            found.append(Row(self.name + label, "steps/s", ours, peer, aim, larger=True))
        return found

    def note(self) -> str:
        """Return a note with the lost throughput, its confidence intervals, and the additional CPU time."""
        if self.failure:
            return f"{self.name}: {self.failure}"
        agents = " and ".join(f"{one:.3f}" for one in self.agents_cpu)
        behind = f"; backups behind by {self.backup_lag} steps at the end" if self.backup else ""
        found = []
        for label, of in (("of the fastest tenth of steps", fastest), ("of all", mean)):
            low, high = interval(self.with_s, self.without_s, of)
            lost = 1 - of(self.without_s) / of(self.with_s)
            found.append(f"{label} {lost:.2%} (95% interval {low:.2%} to {high:.2%})")
        return (
            f"{self.name}: lost {', '.join(found)}, {len(self.with_s)} pairs of blocks; "
            f"more CPU a step: rank {self.rank_cpu:.3f} s, agents {agents} s{behind}"
        )


async def measure(cases: list[Case], *, blocks: int, steps: int) -> list[Case]:
    """Run all cases; a case that fails has no figures."""
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
    case.rank_cpu = (found["cpu"]["with"] - found["cpu"]["without"]) / (blocks * steps)
    saved = blocks * (steps + CALM)
    case.agents_cpu = [(after - one) / saved for one, after in zip(before, agents.cpu_s(), strict=True)]
    if case.backup:
        saved_by = [one.saved for one in agents.newest]
        case.backup_lag = [one.own_step - one.backup_step for one in saved_by]
        case.failure = next((one.backup_problem for one in saved_by if one.backup_problem), "")
