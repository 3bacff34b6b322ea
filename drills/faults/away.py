"""Faults that take a part away for some time: a link, the control host, the ledger's server, or all workers."""

from __future__ import annotations

import asyncio
import math
import signal
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import ClassVar, Literal

from pydantic import Field

from controlplane.local import cluster_processes, plan
from drills.clusters.network import LEDGER, network_of
from drills.faults.fault import Fault
from drills.inject.context import DrillContext
from drills.inject.detection import LINK_REASONS
from drills.judge import facts as gather
from drills.judge.facts import DrillFacts
from drills.observe.observed import Absence
from drills.spec import settings
from drills.spec.fault import FaultOptions, Meets, OnMachine, OnRanks
from drills.spec.job_options import JobOptions
from drills.spec.loss import Loss
from drills.spec.request import DrillRequest
from drills.spec.settings import STEPS_AGAIN, machine_names
from everstep.errors import AgentError, ClusterError, ConfigError
from everstep.model.incident import IncidentReport
from everstep.model.job import JobSpec

RECOVERED_LIMIT_S = 60.0
"""The job has recovered within this time after ``--seconds`` are over, seconds."""
LEDGER_LIMIT_S = 20.0
"""Longest absence of the ledger's server, seconds; workers try to write the end of a job for 30 s."""
NOTICED_S = 2.0
"""An outage is noticed only if it is this many seconds longer than the time after which a job counts as hanging."""
NEAR_S = 10.0
"""If an outage differs by less than this from the allowed silence, the machine may leave or stay, seconds."""
BACK_S = 10.0
"""The job still steps for this long after the control host and a machine reach each other again, seconds."""
AWAY_S = (6.0, 12.0)
"""Absences of a part that a soak draws, seconds."""
LINK_DOWN_S = (6.0, 30.0)
"""Outages of a link that a soak draws, seconds. After the shorter one the job may not even count as hanging."""


class Away(Fault):
    """A part is away; the machines have a network of their own."""

    needs_network = True
    holds_up_backups = True
    meets: ClassVar[Meets] = "away"


class ForSeconds(FaultOptions):
    """A part is away, or hangs, for some seconds."""

    seconds: float = Field(6.0, gt=0, le=300, description="Duration.", json_schema_extra={"metavar": "S"})


class LinkDown(OnMachine, ForSeconds, Away):
    """A machine loses its link: no packet to or from it passes."""

    name = "link-down"
    summary = "a machine's link is down: it reaches no other machine"
    line = "the link of {machine} is down for {seconds:g} s"
    drawn = {"seconds": LINK_DOWN_S}
    alone = True
    may_hang = True
    unreachable = True
    lingering_reasons: ClassVar = LINK_REASONS

    def refuse(self, drill: JobOptions, spec: JobSpec) -> None:
        """Refuse an outage that is too short to be noticed."""
        super().refuse(drill, spec)
        pace_s = settings.STEP_S if drill.step_seconds is None else drill.step_seconds
        least = max(spec.policy.hang.floor_s, spec.policy.hang.factor * pace_s) + NOTICED_S
        if self.seconds < least:
            raise ConfigError(f"--seconds {self.seconds:g} is too short to be noticed: use {least:g} or more")

    def leaving(self, spec: JobSpec) -> list[str]:
        """Return the machine, if it is away for too long."""
        return [self.struck_machine(spec)] if self.seconds > spec.policy.silence.evict_s + NEAR_S else []

    def may_leave(self, spec: JobSpec) -> set[str]:
        """Return the machine, if its outage is about as long as the allowed silence, or longer."""
        return {self.struck_machine(spec)} if self.seconds > spec.policy.silence.evict_s - NEAR_S else set()

    async def strike(self, context: DrillContext) -> None:
        """Take the link down for some seconds."""
        await context.reach(context.request.at_step)
        with network_of(context.cluster, self.name).link_down(context.target.name):
            context.mark(self.name)
            await asyncio.sleep(self.seconds)


class CutOff(OnMachine, ForSeconds, Away):
    """The control host and a machine do not reach each other; the other machines still reach that machine."""

    name = "cut-off"
    summary = "a machine and the control host do not reach each other; other machines reach it"
    line = "{machine} and the control host do not reach each other for {seconds:g} s"
    drawn = {"seconds": AWAY_S}
    alone = True
    may_hang = True
    absorbed: ClassVar = True
    is_silent: ClassVar = True

    cut_from: Literal["control"] = Field(
        "control", description="The host from which it is cut off.", json_schema_extra={"option": "--from"}
    )

    @property
    def steps_after(self) -> int:
        """Enough steps until the control host reaches the machine again."""
        return math.ceil((self.seconds + BACK_S) / settings.STEP_S)

    async def strike(self, context: DrillContext) -> None:
        """Cut the machine off for some seconds, and check that the control host does not reach it."""
        await context.reach(context.request.at_step)
        with network_of(context.cluster, self.name).cut_off(context.target.name):
            began_ns = time.time_ns()
            context.mark(self.name)
            await asyncio.sleep(self.seconds / 2)
            try:
                await context.cluster.control.agents.get(context.target.address).describe(timeout_s=1.0)
            except AgentError:
                await asyncio.sleep(self.seconds / 2)
            else:
                raise ClusterError(f"{context.target.name} answered the control host although it was cut off")
        context.seen.absence = Absence(began_ns, await context.agent_back(context.target, 0))


class BetweenMachines(OnMachine):
    """A fault of the link between two machines."""

    between: tuple[str, str] | None = Field(
        None, description="The two machines.", json_schema_extra={"metavar": "M1 M2"}
    )

    def ends(self, spec: JobSpec) -> tuple[str, str]:
        """Return the two machines, in the order of the job; by default the struck machine and the one before it."""
        names = machine_names(spec.machines)
        index = self.machine_index(spec)
        first, second = sorted(self.between or (names[index - 1], names[index]), key=names.index)
        return first, second

    def refuse(self, drill: JobOptions, spec: JobSpec) -> None:
        """Refuse a machine that the job does not have, and one machine twice."""
        super().refuse(drill, spec)
        names = machine_names(spec.machines)
        for name in self.between or ():
            if name not in names:
                raise ConfigError(f"--between {name}: use two of {', '.join(names)}")
        if self.between and len(set(self.between)) != 2:
            raise ConfigError("--between needs two different machines")


class CutLink(BetweenMachines, Away):
    """Two machines do not reach each other."""

    name = "cut-link"
    summary = "no packet passes between two machines until one of them has left the job"
    alone = True
    own_job = True
    meets = "nothing"
    least_machines = 4
    alike = True

    def describe(self, spec: JobSpec) -> str:
        return f"{' and '.join(self.ends(spec))} do not reach each other"

    @property
    def launches_due(self) -> int:
        """One more launch, since in the first launch the ranks do not reach each other."""
        return super().launches_due + 1

    def leaving(self, spec: JobSpec) -> list[str]:
        return [self.ends(spec)[1]]

    async def strike(self, context: DrillContext) -> None:
        """Cut the link until an incident is over."""
        await context.reach(context.request.at_step)
        with network_of(context.cluster, self.name).cut_link(*self.ends(context.spec)):
            context.mark(self.name)
            await context.incident_over()


class PartDown(OnRanks, ForSeconds, Away):
    """A part of the control plane is killed, and then a rank; the part is started again later."""

    drawn = {"seconds": AWAY_S}

    def loss(self, spec: JobSpec) -> Loss:
        return Loss(ranks=tuple(self.struck_ranks(spec)))


class KillPostgres(PartDown):
    """The ledger's database server is killed."""

    name = "kill-postgres"
    summary = "SIGKILL of the ledger's server, then of a rank; the server stays away until the job steps again"
    line = "SIGKILL to the ledger's server, which stays away for {seconds:g} s at least"
    needs_postgres = True
    steps_needed: ClassVar = STEPS_AGAIN

    def refuse(self, drill: JobOptions, spec: JobSpec) -> None:
        """Refuse an absence after which the end of the job would be missing in the ledger."""
        super().refuse(drill, spec)
        if self.seconds > LEDGER_LIMIT_S:
            raise ConfigError(f"--seconds {self.seconds:g}: the ledger may be away for {LEDGER_LIMIT_S:g} s at most")

    async def strike(self, context: DrillContext) -> None:
        """Kill the server and a rank; start the server again only after the job has recovered."""
        await context.reach(context.request.at_step)
        async with down(context, [LEDGER], self.name):
            await context.second_fault(exact=False)
            await asyncio.gather(asyncio.sleep(self.seconds), self._steps_again(context))

    async def _steps_again(self, context: DrillContext) -> None:
        """Wait until all ranks have completed steps that none had completed before the fault.

        Raises:
            ClusterError: the ranks have not completed them within the time limit.
        """
        wanted, limit_s = context.request.at_step + STEPS_AGAIN, self.seconds + RECOVERED_LIMIT_S
        try:
            async with asyncio.timeout(limit_s):
                await context.reach(wanted)
        except TimeoutError:
            raise ClusterError(f"step {wanted} was not completed within {limit_s:.0f} s of the fault") from None

    async def gather(self, context: DrillContext, facts: DrillFacts) -> None:
        """Add the entries that the ledger still lacks at the end."""
        facts.ledger_lacks = await gather.ledger_lacks(context.cluster, context.spec.name, facts.incidents)

    def problems(
        self, drill: DrillRequest, spec: JobSpec, facts: DrillFacts, reports: Sequence[IncidentReport]
    ) -> list[str]:
        """The recovery must not wait for the ledger, and at the end the ledger must have all entries."""
        away = facts.seen.absence
        stepped = [report.confirmation.stepped_ns for report in reports if report.confirmation]
        late = away is None or away.back_ns is None or not stepped or stepped[-1] > away.back_ns
        return [
            *(["the job did not step again before the ledger was back"] if late else []),
            *(f"the ledger lacks {text}" for text in facts.ledger_lacks),
        ]


class KillWorkers(PartDown):
    """All workers are killed."""

    name = "kill-workers"
    summary = "SIGKILL of all workers, then of a rank; then they come back"
    line = "SIGKILL to all workers, which stay away for {seconds:g} s"

    async def strike(self, context: DrillContext) -> None:
        """Kill the workers and a rank."""
        await context.reach(context.request.at_step)
        async with down(context, workers(context), self.name):
            await context.second_fault(exact=False)
            await asyncio.sleep(self.seconds)


class FreezeWorkers(PartDown):
    """All workers get no CPU time for a while, in the middle of an incident."""

    name = "freeze-workers"
    summary = "SIGKILL of a rank, then SIGSTOP of all workers; then they continue"
    line = "SIGKILL to a rank, then SIGSTOP to all workers for {seconds:g} s"
    needs_network = False

    async def strike(self, context: DrillContext) -> None:
        """Kill a rank, and stop the workers while they recover the job."""
        await context.reach(context.request.at_step)
        pids = [context.cluster.processes()[name] for name in workers(context)]
        processes = [process for process in map(cluster_processes.identify, pids) if process]
        await context.second_fault(exact=False)
        began_ns = time.time_ns()
        context.mark(self.name, victims=pids)
        try:
            for process in processes:
                cluster_processes.send(process, signal.SIGSTOP)
            await asyncio.sleep(self.seconds)
        finally:
            for process in processes:
                cluster_processes.send(process, signal.SIGCONT)
        context.seen.absence = Absence(began_ns, time.time_ns())

    def problems(
        self, drill: DrillRequest, spec: JobSpec, facts: DrillFacts, reports: Sequence[IncidentReport]
    ) -> list[str]:
        """The job must step again sooner after the workers continued than they were stopped."""
        away = facts.seen.absence
        stepped = [report.confirmation.stepped_ns for report in reports if report.confirmation]
        if away is None or away.back_ns is None or not stepped:
            return ["the job did not step again after the workers continued"]
        waited_s = (stepped[-1] - away.back_ns) / 1e9
        if waited_s <= self.seconds:
            return []
        return [
            f"the job stepped again {waited_s:.1f} s after workers continued that were stopped for {self.seconds:g} s"
        ]


def workers(context: DrillContext) -> list[str]:
    """Return the names of the cluster's workers."""
    return [name for name in context.cluster.processes() if name.startswith("worker-")]


@asynccontextmanager
async def down(context: DrillContext, names: list[str], mark: str = "") -> AsyncIterator[None]:
    """Kill processes of the cluster; after the block, start them again and wait until they run.

    Args:
        context: The drill.
        names: Names of the processes.
        mark: Id of the mark to write; empty: write none.

    Raises:
        ClusterError: one of the processes did not run.
    """
    home, pids = context.cluster.file.home, context.cluster.processes()
    if absent := [name for name in names if name not in pids]:
        raise ClusterError(f"{', '.join(absent)} did not run")
    for name in names:
        plan.hold(home, name)
    began_ns = time.time_ns()
    if mark:
        context.mark(mark, victims=[pids[name] for name in names])
    try:
        for name in names:
            if process := cluster_processes.identify(pids[name]):
                cluster_processes.send(process, signal.SIGKILL)
        yield
    finally:
        for name in names:
            plan.let_go(home, name)
    context.seen.absence = Absence(began_ns, await context.processes_back({name: pids[name] for name in names}))
