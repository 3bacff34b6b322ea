"""Agents and fork servers that are killed or hang while the ranks step."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any, Literal

from pydantic import Field

from controlplane.local import cluster_processes, plan
from drills.faults.away import ForSeconds
from drills.faults.fault import Fault
from drills.faults.kill_rank import KillRank
from drills.inject.context import LOOK_S, DrillContext
from drills.judge.facts import DrillFacts
from drills.observe.observed import Absorbed
from drills.observe.processes import await_rank_of
from drills.spec import settings
from drills.spec.fault import (
    STRIKE,
    THEN_AFTER,
    FaultOptions,
    OnMachine,
    OnRanks,
    owners,
    refuse_without_backups,
)
from drills.spec.job_options import JobOptions
from drills.spec.loss import Loss
from drills.spec.request import DrillRequest
from drills.spec.settings import machine_names, placement_of
from everstep.errors import ClusterError, ConfigError
from everstep.model.incident import IncidentReport
from everstep.model.job import JobSpec
from everstep.model.topology import Topology
from everstep.rank import drill_faults as faults
from everstep.system.procfs import children

Then = Literal["", "kill-rank", "kill-machine"]
LAUNCH_LIMIT_S = 60.0
TRANSFER_LIMIT_S = 60.0
"""A backup starts within this time, seconds."""
REACH_LIMIT_S = 300.0
"""A job has started and reached the step within this time, seconds."""
HANG_LIMIT_S = 30.0
HANG_S = (1.0, 2.0, 4.0)
"""Times for which an agent hangs in a soak, seconds: some steps, and not much more than from a fault to the
next gate."""
SLOW_MB_S = 4.0
"""Rate of backups when a drill must hit one in the middle, MB/s: a rank of the example has 1.1 MB and steps of 0.2 s
(``STEP_S``), so a backup is always under way."""


class KillAgent(OnMachine, Fault):
    """The agent of a machine dies."""

    name = "kill-agent"
    summary = (
        "SIGKILL of a node agent; its ranks live on. With --then a rank or the machine is killed once it is back; with "
        "--gone it stays away for longer than a silent machine is waited for"
    )
    meets = "beside"
    holds_up_backups = True

    during: Literal["", "launch"] = Field(
        "", description="launch: in the launch after a rank of the machine was killed."
    )
    then: Then = Field("", description="What is killed once the agent is back.")
    gone: bool = Field(False, description="It stays away for longer than a silent machine is waited for.")

    def refuse(self, drill: JobOptions, spec: JobSpec) -> None:
        """Refuse a second fault when another fault opens the incident."""
        super().refuse(drill, spec)
        if self.then and self.during:
            raise ConfigError(f"--then {self.then} goes without --during")

    @property
    def opening(self) -> FaultOptions:
        """With ``--during`` a killed rank opens the incident, since it causes the launch."""
        return _KilledOnMachine(machine=self.machine) if self.during else self

    def describe(self, spec: JobSpec) -> str:
        at = " at the launch on" if self.during else " of"
        return f"SIGKILL to the agent{at} {self.struck_machine(spec)}"

    @property
    def marks(self) -> tuple[str, ...]:
        """The fault, and the second fault after it."""
        return (self.name, STRIKE) if self.then else (self.name,)

    @property
    def follows(self) -> str:
        return self.then

    @property
    def struck_again(self) -> bool:
        """The second fault strikes once the agent is back."""
        return bool(self.then)

    @property
    def strike_delay(self) -> int | None:
        """The job waits at a step before the second fault."""
        return THEN_AFTER if self.then else None

    def loss(self, spec: JobSpec) -> Loss:
        index = self.machine_index(spec)
        if self.then == "kill-rank":
            return Loss(ranks=(spec.topology().ranks(index)[0],))
        return Loss((index,)) if self.then else Loss()

    @property
    def absorbed(self) -> bool:
        return not self.then

    @property
    def is_silent(self) -> bool:
        return self.gone

    @property
    def stays_away(self) -> bool:
        return self.gone

    @property
    def step_s(self) -> float | None:
        """The steps last long enough for the job to step while its agent is silent."""
        return settings.STEP_S if self.gone else None

    @property
    def steps_after(self) -> int:
        """The steps that the job makes until the agent is back."""
        return settings.SILENT_STEPS if self.gone else super().steps_after

    @property
    def incidents_in_soaks(self) -> int:
        """The launch may belong to another incident."""
        return 2 if self.during else super().incidents_in_soaks

    async def strike(self, context: DrillContext) -> None:
        """Kill the agent, at the step or in a launch, and wait until it is back."""
        if self.during:
            await self._kill_in_launch(context)
            return
        await context.reach(context.request.at_step)
        before, name = context.agent(context.target), f"agent-{context.target.name}"
        with ExitStack() as held:
            if self.gone:
                plan.hold(context.cluster.home, name)
                held.callback(plan.let_go, context.cluster.home, name)
            killed_ns = _kill(context, before)
            if self.gone:
                await asyncio.sleep(settings.SILENT_S)
        context.seen.absorbed = Absorbed(killed_ns, await context.agent_back(context.target, before))

    async def _kill_in_launch(self, context: DrillContext) -> None:
        """Kill the agent as soon as its fork server forked the first rank of the next generation."""
        await context.reach(1, [context.target])
        fork_server = await context.fork_server(context.target)
        known = children(fork_server) or set()
        while faults.fired(context.planned.plan, context.planned.ranks[0]) is None:  # noqa: ASYNC110 - a rank says so, by a file
            await asyncio.sleep(LOOK_S)
        before = context.agent(context.target)
        if await asyncio.to_thread(await_rank_of, fork_server, known, LAUNCH_LIMIT_S) is None:
            raise ClusterError(f"no rank was launched on {context.target.name} within {LAUNCH_LIMIT_S:.0f} s")
        killed_ns = _kill(context, before)
        context.seen.absorbed = Absorbed(killed_ns, await context.agent_back(context.target, before))

    def problems(
        self, drill: DrillRequest, spec: JobSpec, facts: DrillFacts, reports: Sequence[IncidentReport]
    ) -> list[str]:
        """The agent must have been killed within the launch."""
        if not self.during or facts.seen.absorbed is None:
            return []
        killed_ns = facts.seen.absorbed.killed_ns
        within = any(begin <= killed_ns <= end for begin, end in facts.launches_ns)
        return [] if within else ["the agent was not killed within the launch"]

    @classmethod
    def draw(cls, rng: Random, topology: Topology, *, alone: bool) -> dict[str, Any]:
        """Draw the plain fault as often as the variants together."""
        drawn = super().draw(rng, topology, alone=alone)
        how = rng.choice(({}, {}, {}, {"during": "launch"}, {"then": "kill-rank"}, {"then": "kill-machine"}))
        return drawn | (how if alone else {})


class _KilledOnMachine(OnMachine, KillRank):
    """The first rank of a machine is killed, which causes a launch there; by default the job's last rank."""

    @property
    def launches_due(self) -> int:
        """One launch more, since the fault breaks a launch."""
        return super().launches_due + 1


class KillForkServer(OnMachine, Fault):
    """The job's fork server on a machine dies."""

    name = "kill-forkserver"
    summary = "SIGKILL of a job's fork server; its ranks live on"
    line = "SIGKILL to the fork server of {machine}"
    alone = True
    meets = "beside"
    holds_up_backups = True

    @property
    def absorbed(self) -> bool:
        """The job continues: the ranks stay alive."""
        return True

    @property
    def step_s(self) -> None:
        """None: the job waits for a new fork server, so its steps need no set length."""
        return None

    async def strike(self, context: DrillContext) -> None:
        """Kill the fork server, and wait until a new one is ready."""
        await context.reach(context.request.at_step)
        before = await context.fork_server(context.target)
        if not before:
            raise ClusterError(f"the job has no fork server on {context.target.name}")
        killed_ns = _kill(context, before)
        context.seen.absorbed = Absorbed(killed_ns, await context.fork_server_back(context.target, before))


class HangPeer(OnMachine, ForSeconds, Fault):
    """An agent that receives backups is stopped."""

    name = "hang-peer"
    summary = "SIGSTOP of an agent while it receives backups"
    line = "SIGSTOP to the agent of {machine} for {seconds:g} s"
    drawn = {"seconds": HANG_S}
    alone = True
    meets = "beside"
    holds_up_backups = True
    delays_backups = True

    def refuse(self, drill: JobOptions, spec: JobSpec) -> None:
        """Refuse a hang that would count as a lost machine, and a job without backups."""
        super().refuse(drill, spec)
        if self.seconds > HANG_LIMIT_S:
            raise ConfigError(f"--seconds {self.seconds:g}: an agent may hang for {HANG_LIMIT_S:g} s at most")
        refuse_without_backups(self, spec)

    @property
    def absorbed(self) -> bool:
        return True

    @property
    def is_silent(self) -> bool:
        """The agent reports nothing while its ranks step and back up their state."""
        return True

    async def strike(self, context: DrillContext) -> None:
        """Stop the agent for some seconds while backups flow to it."""
        await context.reach(context.request.at_step)
        agent = cluster_processes.identify(context.agent(context.target))
        if agent is None:
            raise ClusterError(f"the agent of {context.target.name} is gone")
        others = [machine for machine in context.machines if machine is not context.target]
        stopped_ns = time.time_ns()
        try:
            context.mark(self.name, time_ns=stopped_ns)
            cluster_processes.send(agent, signal.SIGSTOP)
            await context.listen(self.seconds, others)
        finally:
            cluster_processes.send(agent, signal.SIGCONT)
        context.seen.absorbed = Absorbed(stopped_ns, time.time_ns())


class HangAgents(OnRanks, ForSeconds, Fault):
    """The agents of several machines hang at once, so that the breaker must decide."""

    name = "hang-agents"
    summary = "SIGSTOP of the agents of several machines at once, then SIGKILL of a rank of another one"
    not_soaked = "needs more machines than a soak's job has, for the breaker to be asked"

    count: int = Field(2, ge=1, description="Of so many machines, the last ones.", json_schema_extra={"metavar": "N"})

    def struck_ranks(self, spec: JobSpec) -> list[int]:
        """By default the first rank, since its machine's agent does not hang."""
        return list(dict.fromkeys(self.ranks)) or [0]

    def refuse(self, drill: JobOptions, spec: JobSpec) -> None:
        """Refuse too few machines to trip the breaker, or so many that none is left."""
        super().refuse(drill, spec)
        most = max(spec.policy.evict.share * spec.machines, spec.policy.evict.at_least)
        if not most < self.count < spec.machines:
            raise ConfigError(
                f"--count {self.count} of {spec.machines} machines: the breaker lets {most:g} go, and one has to be "
                f"left: use {math.floor(most) + 1} to {spec.machines - 1}"
            )
        if hung := [rank for rank in self.ranks if spec.topology().machine(rank) >= spec.machines - self.count]:
            raise ConfigError(f"--rank {hung[0]} is on a machine whose agent hangs: name another one")

    def describe(self, spec: JobSpec) -> str:
        """The machines, and the length of the hang."""
        return f"SIGSTOP to the agents of {' and '.join(self.hung_machines(spec))} for {self.seconds:g} s"

    def hung_machines(self, spec: JobSpec) -> list[str]:
        """The machines whose agents hang: the last ones of the job."""
        return machine_names(spec.machines)[-self.count :]

    def loss(self, spec: JobSpec) -> Loss:
        return Loss(ranks=tuple(self.struck_ranks(spec)))

    @property
    def patience(self) -> dict[str, Any]:
        """The policy evicts a silent machine soon."""
        return settings.GONE_POLICY

    @property
    def parked_for_a_while(self) -> bool:
        """The job is parked until the agents answer again."""
        return True

    async def strike(self, context: DrillContext) -> None:
        """Stop the agents, then kill a rank of another machine, then let the agents resume."""
        await context.reach(context.request.at_step)
        names = self.hung_machines(context.spec)
        hung = [cluster_processes.identify(context.agent(one)) for one in context.machines if one.name in names]
        agents = [agent for agent in hung if agent is not None]
        stopped_ns = time.time_ns()
        try:
            for agent in agents:
                cluster_processes.send(agent, signal.SIGSTOP)
            context.mark(self.name, time_ns=stopped_ns, victims=names)
            await context.second_fault(exact=False)
            await asyncio.sleep(self.seconds)
        finally:
            for agent in agents:
                cluster_processes.send(agent, signal.SIGCONT)
        context.seen.absorbed = Absorbed(stopped_ns, time.time_ns())

    def problems(
        self, drill: DrillRequest, spec: JobSpec, facts: DrillFacts, reports: Sequence[IncidentReport]
    ) -> list[str]:
        """The job must have waited for an operator."""
        asked = any("would be evicted" in text for text in facts.texts)
        return [] if asked else ["nobody was notified that the breaker tripped"]


class KillPeer(OnMachine, Fault):
    """An agent dies while it receives a backup."""

    name = "kill-peer"
    summary = "SIGKILL of an agent in the middle of a backup; once it is back, the owner's machine or rank is killed"
    line = "SIGKILL to the agent of {machine} in the middle of a backup"
    drawn = {"then": ("", "kill-rank", "kill-machine")}

    then: Then = Field("", description="What of the owner is killed once the agent is back; by default its machine.")

    def refuse(self, drill: JobOptions, spec: JobSpec) -> None:
        """Refuse a job without backups."""
        super().refuse(drill, spec)
        refuse_without_backups(self, spec)

    def machine_index(self, spec: JobSpec) -> int:
        """By default the machine that has the backup of the last rank."""
        rank = self.struck_ranks(spec)[0]
        peer = None if self.machine else placement_of(spec).peers[rank]
        return spec.topology().machine(rank if peer is None else peer)

    @property
    def follows(self) -> str:
        return self.then

    @property
    def struck_again(self) -> bool:
        """The second fault strikes once the agent is back."""
        return True

    @property
    def strike_delay(self) -> int:
        """The job waits at a step before the second fault."""
        return THEN_AFTER

    def loss(self, spec: JobSpec) -> Loss:
        """The loss of a rank whose backup is on the machine, or of that rank's machine."""
        owner = owners(spec, self.machine_index(spec))[0]
        return Loss(ranks=(owner,)) if self.then == "kill-rank" else Loss((spec.topology().machine(owner),))

    def checkpoint(self, disk: Path) -> dict[str, Any]:
        return {"backup_rate_mb_s": SLOW_MB_S}

    async def strike(self, context: DrillContext) -> None:
        """Kill the agent while it receives a backup."""
        index, step = context.machines.index(context.target), context.request.at_step
        before = context.agent(context.target)
        # Read from the files: an agent's report would arrive after the backup has ended.
        await context.until(lambda: context.stored.newest() >= step, REACH_LIMIT_S, f"step {step} was not reached")

        def caught() -> bool:
            deadline = time.monotonic() + TRANSFER_LIMIT_S
            while time.monotonic() < deadline:
                if context.stored.receiving(index) is not None:
                    return True
                time.sleep(0.0005)
            return False

        if not await asyncio.to_thread(caught):
            raise ClusterError(f"no backup was on its way to {context.target.name} within {TRANSFER_LIMIT_S:.0f} s")
        killed_ns = _kill(context, before)
        context.seen.absorbed = Absorbed(killed_ns, await context.agent_back(context.target, before))


def _kill(context: DrillContext, pid: int) -> int:
    context.mark(context.request.fault.name, victim=pid)
    os.kill(pid, signal.SIGKILL)
    return time.time_ns()
