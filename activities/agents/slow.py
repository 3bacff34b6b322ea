"""The activity of one round of the vote for a slow machine: looks at all ranks for some seconds, while they go on.

A round that is asked for again, because its worker died, looks anew; what earlier rounds said stays.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence

from temporalio import activity

from activities import messages
from activities.agents.kept_looks import KeptLooks
from activities.agents.looks import ANSWERS_S, LOOK_S, RankLook, look
from activities.heartbeat import heartbeating
from activities.ledger import Ledger
from activities.messages import SlowRoundInput
from activities.turns import gathered
from agent.client import AgentClients
from agent.tracer.dump_files import files_of
from agent.v1 import agent_pb2 as pb
from everstep.decisions.blame.slow.by_samples import RankAtWork, counted, slow_round
from everstep.decisions.blame.slow.own_past import RankTimes
from everstep.decisions.detect.cpu_watch import CpuPerStep
from everstep.dumps.folder import FolderReader
from everstep.dumps.py_spy import StackReader
from everstep.errors import DumpError, EverstepError
from everstep.model.job import JobSpec
from everstep.model.machine import Machine
from everstep.model.slow import SlowRound

LOOKS = 10
"""In a round; fewer where a look takes longer."""
PACE_S = 2.0
"""A machine has so long to say how fast its ranks are."""
SLEEPS = "S"
"""State of a process that waits for something."""
SILENT_KEPT = 8
LOGGED = 16
"""Ranks of which the log says in how many looks they did something of their own."""


class SlowActivities:
    """The activity of one round of the vote for a slow machine."""

    def __init__(self, agents: AgentClients, ledger: Ledger) -> None:
        self._agents = agents
        self._kept = KeptLooks(ledger)

    @activity.defn(name=messages.SLOW_ROUND)
    async def slow_round(self, given: SlowRoundInput) -> SlowRound:
        """Look at all ranks of a job that became slow, for one round; returns who has the flag, and why."""
        spec, machines = given.spec, given.machines
        topology, stacks = spec.topology(), StackReader()
        seen: list[dict[int, RankAtWork]] = []
        silent: set[str] = set()
        began = time.monotonic()
        async with heartbeating() as say:
            while (now := time.monotonic()) - began < given.round_s or not seen:
                say(f"look {len(seen) + 1} at the ranks on {len(machines)} machines")
                # Who is slow is slowed by looks, most of all by its own threads that write its flight record.
                one = await look(
                    self._agents,
                    spec.name,
                    machines,
                    generation=given.generation,
                    limit_s=min(given.round_s, LOOK_S),
                    ranks_only=bool(seen),
                )
                if not seen:
                    await self._kept.keep(given.incident, [one], given.number)
                silent |= one.silent.keys()
                seen.append(await asyncio.to_thread(_read, one, stacks))
                await asyncio.sleep(max(now + given.round_s / LOOKS - time.monotonic(), 0.0))
            times = await self._times(spec, machines, given.generation)
            names = [machine.name for machine in machines]
            counts = counted(seen)
            found = await asyncio.to_thread(
                slow_round, counts, times, topology, names=names, number=given.number, looks=len(seen)
            )
        computes = {rank: f"{counts[rank].computes} of {counts[rank].looks}" for rank in sorted(counts)[:LOGGED]}
        activity.logger.info(
            "a round of looks at a slow job",
            extra={
                "incident": given.incident,
                "round": given.number,
                "flag": found.flagged,
                "longer": found.longer,
                "computes": computes,
            },
        )
        return found.model_copy(update={"silent": sorted(silent)[:SILENT_KEPT]})

    async def _times(self, spec: JobSpec, machines: Sequence[Machine], generation: int) -> dict[int, RankTimes]:
        """How fast the ranks are, as their machines say now; those that do not say it are left out."""
        found: dict[int, RankTimes] = {}

        async def ask(machine: Machine) -> None:
            request = pb.ProgressRequest(job=spec.name, interval_s=PACE_S)
            with contextlib.suppress(EverstepError, TimeoutError):
                async with asyncio.timeout(PACE_S + ANSWERS_S):
                    async for reply in self._agents.get(machine.address).progress(request):
                        ours = [one for one in reply.ranks if one.generation == generation and one.alive]
                        found.update({one.rank: times_of(one.metrics) for one in ours if one.metrics.step_s > 0})
                        return

        await gathered(ask(machine) for machine in machines)
        return found


def times_of(metrics: pb.Metrics) -> RankTimes:
    """What a rank's metrics say of its pace."""
    tokens = metrics.tokens_per_s * metrics.step_s
    before = metrics.typical_tokens_per_s * metrics.typical_step_s
    return RankTimes(
        # Of the steps in which it took this CPU time: a look at it may lie 31 steps back.
        step_s=metrics.cpu.step_s or metrics.step_s,
        typical_step_s=metrics.typical_step_s,
        cpu=_cpu(metrics.cpu) if metrics.HasField("cpu") else None,
        typical_cpu=_cpu(metrics.typical_cpu) if metrics.HasField("typical_cpu") else None,
        work=tokens / before if tokens > 0 and before > 0 else None,
    )


def _cpu(value: pb.CpuPerStep) -> CpuPerStep:
    return CpuPerStep(value.had_s, value.waited_s, value.step_s)


def _read(one: RankLook, stacks: StackReader) -> dict[int, RankAtWork]:
    """What one look shows of each rank; what cannot be read is left out."""
    reader = FolderReader(stacks)
    for reply in one.replies.values():
        for name, data in files_of(reply):
            try:
                reader.read({name: data})
            except DumpError:
                continue
    processes = (process for reply in one.replies.values() for process in reply.processes)
    asleep = {process.rank for process in processes if process.role == "trainer" and process.state == SLEEPS}
    return {rank: RankAtWork(found, rank in asleep) for rank, found in reader.evidence().ranks.items()}
