"""Faults of agents and fork servers, which are killed or hang while the ranks step."""

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
from typing import Any, ClassVar, Literal

from pydantic import Field

from controlplane.local import cluster_processes, plan
from drills.faults.away import ForSeconds
from drills.faults.fault import Fault
from drills.faults.rank_ends import KillRank
from drills.inject.context import POLL_S, DrillContext
from drills.judge.facts import DrillFacts
from drills.observe.observed import Absence
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
"""A rank is launched within this time after another one was killed, seconds."""
TRANSFER_LIMIT_S = 60.0
"""A backup starts within this time, seconds."""
REACH_LIMIT_S = 300.0
"""The job has started and reached the step within this time, seconds."""
HANG_LIMIT_S = 30.0
"""Longest hang of an agent, seconds."""
HANG_S = (1.0, 2.0, 4.0)
"""Durations of an agent's hang that a soak draws, seconds. They are so short that the job soon reaches the step at
which the soak checks it."""
SLOW_MB_S = 4.0
"""Limit of the rate of backups, MB/s. It is so low that a backup is always under way: a rank of the example has a state
of 1.1 MB and steps of 0.2 s."""


class KillAgent(OnMachine, Fault):
    """The agent of a machine is killed, and restarted by its supervisor."""

    name = "kill-agent"
    summary = (
        "SIGKILL of a node agent; its ranks continue. With --then a rank or the machine is killed once the agent is "
        "back; with --gone the agent stays away until its machine counts as silent"
    )
    meets = "beside"
    holds_up_backups = True

    during: Literal["", "launch"] = Field(
        "", description="launch: kill the agent in the launch after a rank of the machine was killed."
    )
    then: Then = Field("", description="What is killed once the agent is back.")
    gone: bool = Field(False, description="The agent stays away until its machine counts as silent.")

    def refuse(self, drill: JobOptions, spec: JobSpec) -> None:
        """Refuse a second fault when another fault opens the incident."""
        super().refuse(drill, spec)
        if self.then and self.during:
            raise ConfigError(f"--then {self.then} cannot be combined with --during")

    @property
    def opening(self) -> FaultOptions:
        """With ``--during`` a killed rank opens the incident, since it causes the launch."""
        return _KilledOnMachine(machine=self.machine) if self.during else self

    def describe(self, spec: JobSpec) -> str:
        at = " at the launch on" if self.during else " of"
        return f"SIGKILL to the agent{at} {self.struck_machine(spec)}"

    @property
    def marks(self) -> tuple[str, ...]:
        return (self.name, STRIKE) if self.then else (self.name,)

    @property
    def follows(self) -> str:
        return self.then

    @property
    def struck_again(self) -> bool:
        return bool(self.then)

    @property
    def strike_delay(self) -> int | None:
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
        """Steps are long enough that the job does not end while the agent is silent."""
        return settings.STEP_S if self.gone else None

    @property
    def steps_after(self) -> int:
        """Enough steps until the agent is back."""
        return settings.SILENT_STEPS if self.gone else super().steps_after

    @property
    def incidents_in_soaks(self) -> int:
        """Two incidents, since the agent may be killed in a launch that belongs to the incident of another fault."""
        return 2 if self.during else super().incidents_in_soaks

    async def strike(self, context: DrillContext) -> None:
        """Kill the agent, at the step or in a launch, and wait until it is back."""
        if self.during:
            await self._kill_in_launch(context)
            return
        await context.reach(context.request.at_step)
        before, name = context.agent(context.target), f"agent-{context.target.name}"
        with ExitStack() as stack:
            if self.gone:
                plan.hold(context.cluster.home, name)
                stack.callback(plan.let_go, context.cluster.home, name)
            killed_ns = _kill(context, before)
            if self.gone:
                await asyncio.sleep(settings.SILENT_S)
        context.seen.absence = Absence(killed_ns, await context.agent_back(context.target, before))

    async def _kill_in_launch(self, context: DrillContext) -> None:
        """Kill the agent as soon as its fork server has forked the first rank of the next generation."""
        await context.reach(1, [context.target])
        fork_server = await context.fork_server(context.target)
        children_before = children(fork_server) or set()
        while faults.fired(context.planned.plan, context.planned.ranks[0]) is None:  # noqa: ASYNC110 - a rank writes a file
            await asyncio.sleep(POLL_S)
        before = context.agent(context.target)
        if await asyncio.to_thread(await_rank_of, fork_server, children_before, LAUNCH_LIMIT_S) is None:
            raise ClusterError(f"no rank was launched on {context.target.name} within {LAUNCH_LIMIT_S:.0f} s")
        killed_ns = _kill(context, before)
        context.seen.absence = Absence(killed_ns, await context.agent_back(context.target, before))

    def problems(
        self, drill: DrillRequest, spec: JobSpec, facts: DrillFacts, reports: Sequence[IncidentReport]
    ) -> list[str]:
        """The agent must have been killed within the launch."""
        if not self.during or facts.seen.absence is None:
            return []
        killed_ns = facts.seen.absence.began_ns
        within = any(begin <= killed_ns <= end for begin, end in facts.launches_ns)
        return [] if within else ["the agent was not killed within the launch"]

    @classmethod
    def draw(cls, rng: Random, topology: Topology, *, alone: bool) -> dict[str, Any]:
        """Draw the fault without options as often as all its variants together."""
        drawn = super().draw(rng, topology, alone=alone)
        how = rng.choice(({}, {}, {}, {"during": "launch"}, {"then": "kill-rank"}, {"then": "kill-machine"}))
        return drawn | (how if alone else {})


class _KilledOnMachine(OnMachine, KillRank):
    """The first rank of a machine is killed, which causes a launch there."""

    @property
    def launches_due(self) -> int:
        """One more launch, since the fault breaks a launch."""
        return super().launches_due + 1


class KillForkServer(OnMachine, Fault):
    """The job's fork server on a machine is killed."""

    name = "kill-forkserver"
    summary = "SIGKILL of a job's fork server; its ranks continue"
    line = "SIGKILL to the fork server of {machine}"
    alone = True
    meets = "beside"
    holds_up_backups = True
    absorbed: ClassVar = True
    step_s: ClassVar = None  # the job waits for the new fork server, so it may step as fast as possible

    async def strike(self, context: DrillContext) -> None:
        """Kill the fork server, and wait until a new one is ready."""
        await context.reach(context.request.at_step)
        before = await context.fork_server(context.target)
        if not before:
            raise ClusterError(f"the job has no fork server on {context.target.name}")
        killed_ns = _kill(context, before)
        context.seen.absence = Absence(killed_ns, await context.fork_server_back(context.target, before))


class HangPeer(OnMachine, ForSeconds, Fault):
    """An agent that receives backups hangs for some seconds."""

    name = "hang-peer"
    summary = "SIGSTOP of an agent while it receives backups"
    line = "SIGSTOP to the agent of {machine} for {seconds:g} s"
    drawn = {"seconds": HANG_S}
    alone = True
    meets = "beside"
    holds_up_backups = True
    delays_backups = True
    absorbed: ClassVar = True
    is_silent: ClassVar = True

    def refuse(self, drill: JobOptions, spec: JobSpec) -> None:
        """Refuse a hang that would count as a lost machine, and a job without backups."""
        super().refuse(drill, spec)
        if self.seconds > HANG_LIMIT_S:
            raise ConfigError(f"--seconds {self.seconds:g}: an agent may hang for {HANG_LIMIT_S:g} s at most")
        refuse_without_backups(self, spec)

    async def strike(self, context: DrillContext) -> None:
        """Stop the agent for some seconds while backups flow to it."""
        await context.reach(context.request.at_step)
        agent = cluster_processes.identify(context.agent(context.target))
        if agent is None:
            raise ClusterError(f"the agent of {context.target.name} is gone")
        answering = [machine for machine in context.machines if machine is not context.target]
        stopped_ns = time.time_ns()
        try:
            context.mark(self.name, time_ns=stopped_ns)
            cluster_processes.send(agent, signal.SIGSTOP)
            await context.listen(self.seconds, answering)
        finally:
            cluster_processes.send(agent, signal.SIGCONT)
        context.seen.absence = Absence(stopped_ns, time.time_ns())


class HangAgents(OnRanks, ForSeconds, Fault):
    """The agents of several machines hang at once, so many that the breaker asks an operator."""

    name = "hang-agents"
    summary = "SIGSTOP of the agents of several machines at once, then SIGKILL of a rank of another one"
    not_soaked = "the breaker only trips in a job with more machines than a soak's job has"
    patience: ClassVar = settings.QUICK
    parked_for_a_while: ClassVar = True

    count: int = Field(
        2, ge=1, description="Number of machines, counted from the job's last.", json_schema_extra={"metavar": "N"}
    )

    def struck_ranks(self, spec: JobSpec) -> list[int]:
        """Return the ranks that the options name, or the first rank: the agent of its machine does not hang."""
        return list(dict.fromkeys(self.ranks)) or [0]

    def refuse(self, drill: JobOptions, spec: JobSpec) -> None:
        """Refuse too few machines to trip the breaker, and so many that none is left."""
        super().refuse(drill, spec)
        most = max(spec.policy.evict.share * spec.machines, spec.policy.evict.at_least)
        if not most < self.count < spec.machines:
            raise ConfigError(
                f"--count {self.count} of {spec.machines} machines: the breaker allows {most:g}, and one has to stay: "
                f"use {math.floor(most) + 1} to {spec.machines - 1}"
            )
        if hung := [rank for rank in self.ranks if spec.topology().machine(rank) >= spec.machines - self.count]:
            raise ConfigError(f"--rank {hung[0]} is on a machine whose agent hangs: name another one")

    def describe(self, spec: JobSpec) -> str:
        return f"SIGSTOP to the agents of {' and '.join(self.hung_machines(spec))} for {self.seconds:g} s"

    def hung_machines(self, spec: JobSpec) -> list[str]:
        """Return the machines whose agents hang: the last ones of the job."""
        return machine_names(spec.machines)[-self.count :]

    def loss(self, spec: JobSpec) -> Loss:
        return Loss(ranks=tuple(self.struck_ranks(spec)))

    async def strike(self, context: DrillContext) -> None:
        """Stop the agents, then kill a rank of another machine, then let the agents resume."""
        await context.reach(context.request.at_step)
        names = self.hung_machines(context.spec)
        hung = [cluster_processes.identify(context.agent(m)) for m in context.machines if m.name in names]
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
        context.seen.absence = Absence(stopped_ns, time.time_ns())

    def problems(
        self, drill: DrillRequest, spec: JobSpec, facts: DrillFacts, reports: Sequence[IncidentReport]
    ) -> list[str]:
        """The breaker must have asked an operator."""
        asked = any("would be evicted" in text for text in facts.texts)
        return [] if asked else ["no incident reports that the breaker tripped"]


class KillPeer(OnMachine, Fault):
    """An agent is killed while it receives a backup."""

    name = "kill-peer"
    summary = "SIGKILL of an agent in the middle of a backup; once it is back, the owner's machine or rank is killed"
    line = "SIGKILL to the agent of {machine} in the middle of a backup"
    drawn = {"then": ("", "kill-rank", "kill-machine")}
    struck_again: ClassVar = True
    strike_delay: ClassVar = THEN_AFTER

    then: Then = Field("", description="The backup's rank or (default) its machine is killed once the agent is back.")

    def refuse(self, drill: JobOptions, spec: JobSpec) -> None:
        """Refuse a job without backups."""
        super().refuse(drill, spec)
        refuse_without_backups(self, spec)

    def machine_index(self, spec: JobSpec) -> int:
        """Return the machine that the options name, or the one that has the backup of the struck rank."""
        rank = self.struck_ranks(spec)[0]
        peer = None if self.machine else placement_of(spec).peers[rank]
        return spec.topology().machine(rank if peer is None else peer)

    @property
    def follows(self) -> str:
        return self.then

    def loss(self, spec: JobSpec) -> Loss:
        """Return the loss of a rank whose backup is on the machine, or of the machine of that rank."""
        owner = owners(spec, self.machine_index(spec))[0]
        return Loss(ranks=(owner,)) if self.then == "kill-rank" else Loss((spec.topology().machine(owner),))

    def checkpoint(self, disk: Path) -> dict[str, Any]:
        return {"backup_rate_mb_s": SLOW_MB_S}

    async def strike(self, context: DrillContext) -> None:
        """Kill the agent while it receives a backup."""
        index, step = context.machines.index(context.target), context.request.at_step
        before = context.agent(context.target)
        # Read the files: an agent's report would arrive only after the backup.
        await context.until(lambda: context.stored.newest() >= step, REACH_LIMIT_S, f"step {step} was not reached")

        def backup_under_way() -> bool:
            deadline = time.monotonic() + TRANSFER_LIMIT_S
            while time.monotonic() < deadline:
                if context.stored.receiving(index) is not None:
                    return True
                time.sleep(0.0005)
            return False

        if not await asyncio.to_thread(backup_under_way):
            raise ClusterError(f"{context.target.name} received no backup within {TRANSFER_LIMIT_S:.0f} s")
        killed_ns = _kill(context, before)
        context.seen.absence = Absence(killed_ns, await context.agent_back(context.target, before))


def _kill(context: DrillContext, pid: int) -> int:
    context.mark(context.request.fault.name, victim=pid)
    os.kill(pid, signal.SIGKILL)
    return time.time_ns()
