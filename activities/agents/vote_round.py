"""Vote round: sample all ranks of a slow job for some seconds, while they continue.

A round that is repeated because its worker died takes new samples; the results of earlier rounds stay.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from datetime import timedelta
from typing import TYPE_CHECKING

from temporalio import activity

from activities.activity import Activity, Bounds, within
from activities.heartbeat import Say
from activities.turns import gathered
from everstep.decisions.blame.slow.by_samples import FEWEST_SAMPLES, SampleCounts, count_sample, slow_round
from everstep.decisions.blame.slow.own_past import CpuPerStep, RankTimes
from everstep.errors import EverstepError
from everstep.model.job import PlacedJob
from everstep.model.machine import Machine
from everstep.model.slow import SlowRound

if TYPE_CHECKING:
    from activities.agents.looks import RankLook
    from activities.tools import Tools
    from agent.v1 import agent_pb2 as pb

ROOM = timedelta(seconds=20)
"""The time of a round in addition to its samples."""

LOOKS = 10
"""The largest number of samples in a round; there are fewer if a sample takes longer."""
PACE_S = 2.0
"""The longest wait for a machine's report of how fast its ranks step, seconds."""
SILENT_KEPT = 8
"""The largest number of silent machines in the result."""
LOGGED = 16
"""The largest number of ranks in the log, which shows in how many samples each of them computed."""


class VoteRound(Activity[SlowRound]):
    """Sample all ranks of a slow job for one round; the result is the machine that gets the flag, and the reason.

    A round has at least as many samples as a rank needs to count; it is longer if a sample takes long. If a worker
    dies, the activity is retried; all attempts together may take as long as about three rounds.
    """

    name = "Look for a slow machine"

    job: PlacedJob
    generation: int
    incident: str
    """The id of the incident's workflow: stacks of the round's first sample are kept under it."""
    number: int
    """The number of the round, from 1."""

    @property
    def round_s(self) -> float:
        """The length of the round, seconds."""
        return self.job.spec.policy.slow.round_s

    def line(self) -> str:
        return f"round {self.number} of {self.job.spec.policy.slow.rounds}: which machine the others wait for"

    def bounds(self) -> Bounds:
        return within(timedelta(seconds=3 * self.round_s) + ROOM)

    async def perform(self, tools: Tools, say: Say) -> SlowRound:
        from activities.agents.looks import LOOK_S, keep_looks, look

        spec, machines = self.job.spec, self.job.machines
        first: RankLook | None = None
        counts: dict[int, SampleCounts] = {}
        silent: set[str] = set()
        looks, began = 0, time.monotonic()
        while (now := time.monotonic()) - began < self.round_s or looks < FEWEST_SAMPLES:
            say(f"sample {looks + 1} of the ranks on {len(machines)} machines")
            # A sample slows a slow rank further, mostly because the rank's own threads write its flight record. So only
            # the first sample of the round has flight records.
            one = await look(
                tools.agents,
                spec.name,
                machines,
                generation=self.generation,
                limit_s=min(self.round_s, LOOK_S),
                ranks_only=first is not None,
            )
            first = first or one
            looks += 1
            silent |= one.silent.keys()
            for part in one.parts.values():
                count_sample(counts, part.ranks)
            await asyncio.sleep(max(now + self.round_s / LOOKS - time.monotonic(), 0.0))
        times = await self._times(tools)
        names = [machine.name for machine in machines]
        assert first is not None
        found = await asyncio.to_thread(
            slow_round, counts, times, spec.topology(), names=names, number=self.number, looks=looks
        )
        await keep_looks(tools, self.incident, self.job, [first], named=found.ranks, first=self.number)
        computes = {rank: f"{counts[rank].computes} of {counts[rank].samples}" for rank in sorted(counts)[:LOGGED]}
        activity.logger.info(
            "a slow job was sampled for one round",
            extra={
                "incident": self.incident,
                "round": self.number,
                "flag": found.flagged,
                "longer": found.longer,
                "computes": computes,
            },
        )
        return found.model_copy(update={"silent": sorted(silent)[:SILENT_KEPT]})

    async def _times(self, tools: Tools) -> dict[int, RankTimes]:
        """Return the pace of the ranks from their machines' metrics; machines that do not answer are left out."""
        from activities.agents.looks import ANSWERS_S
        from agent.v1 import agent_pb2 as pb

        found: dict[int, RankTimes] = {}

        async def ask(machine: Machine) -> None:
            request = pb.ProgressRequest(job=self.job.spec.name, interval_s=PACE_S)
            with contextlib.suppress(EverstepError, TimeoutError):
                async with asyncio.timeout(PACE_S + ANSWERS_S):
                    async for reply in tools.agents.get(machine.address).progress(request):
                        ours = [one for one in reply.ranks if one.generation == self.generation and one.alive]
                        found.update({one.rank: times_of(one.metrics) for one in ours if one.metrics.step_s > 0})
                        return

        await gathered(ask(machine) for machine in self.job.machines)
        return found


def times_of(metrics: pb.Metrics) -> RankTimes:
    """Return the pace of a rank from its metrics."""
    tokens = metrics.tokens_per_s * metrics.step_s
    before = metrics.typical_tokens_per_s * metrics.typical_step_s
    return RankTimes(
        # The duration of the steps over which the CPU time was measured; they may be 31 steps older than the last step.
        step_s=metrics.cpu.step_s or metrics.step_s,
        typical_step_s=metrics.typical_step_s,
        cpu=_cpu(metrics.cpu) if metrics.HasField("cpu") else None,
        typical_cpu=_cpu(metrics.typical_cpu) if metrics.HasField("typical_cpu") else None,
        work=tokens / before if tokens > 0 and before > 0 else None,
    )


def _cpu(value: pb.CpuPerStep) -> CpuPerStep:
    return CpuPerStep(value.had_s, value.waited_s, value.step_s)
