"""Faults that make steps take longer: a machine with little CPU time, a slow link, and uneven work."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from agent.tracer.processes import used
from drills.clusters.network import network_of
from drills.faults.away import BetweenMachines
from drills.faults.fault import Fault
from drills.inject import process_group
from drills.inject.context import DrillContext
from drills.judge.facts import DrillFacts
from drills.observe.observed import Absence
from drills.spec import settings
from drills.spec.fault import LIGHT, OnMachine, OnRanks
from drills.spec.request import UNEVEN, DrillRequest
from everstep.errors import CannotInject
from everstep.model.incident import IncidentReport
from everstep.model.job import JobSpec
from everstep.model.slow import SlowConclusion

MEASURE_S = 3.0
"""Time over which the CPU usage of ranks is measured, seconds."""
UNEVEN_MS = 30
"""Additional work of one rank, milliseconds of CPU time."""
LINK_BYTES = 14e6
"""Rate of a link, which ``--factor`` divides, bytes per second; the example exchanges 1.4 MB in each step."""
FIRST, SECOND = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")
"""Folder of control groups in the first and in the second version of cgroups."""
PERIOD_US = 20_000
"""Period of the CPU limit, microseconds: short compared to a step, so that each part of a step is slow."""
LEAST_US = 1_000
"""Smallest CPU time in a period that the kernel accepts, microseconds."""


class SlowFault(Fault):
    """Steps take longer until an incident names the cause."""

    not_soaked = "takes two minutes, one of them until the job's pace is known: the wide drills have it"
    sizes: ClassVar[dict[str, Any]] = {"machines": 4, "ranks_per_machine": 1, "tp": 1, "pp": 1}
    """All ranks do the same work."""
    least_step = settings.SLOW_AT
    is_slowed = True
    alone = True
    absorbed: ClassVar = True
    only_reported: ClassVar = True
    step_s: ClassVar = settings.SLOW_STEP_S
    steps_after: ClassVar = settings.SLOW_STEPS
    patience: ClassVar = settings.SLOW_POLICY

    factor: float = Field(
        2.0, ge=1.5, le=20, description="Steps take about this many times as long.", json_schema_extra={"metavar": "F"}
    )

    @asynccontextmanager
    async def slowed(self, context: DrillContext) -> AsyncIterator[None]:
        """Make steps slow while the block runs; by default the script itself makes them slow."""
        yield

    async def strike(self, context: DrillContext) -> None:
        """Make steps slow from the step on until an incident is over."""
        await context.reach(context.request.at_step)
        began_ns = time.time_ns()
        async with self.slowed(context):
            context.mark(self.name)
            await context.incident_over()
        if not context.request.replaces:
            context.seen.absence = Absence(began_ns, time.time_ns())

    def wrong_conclusion(self, conclusion: object, machines: Sequence[str], spec: JobSpec) -> str:
        """Return why the vote's conclusion is wrong; empty: it is right. By default no machine may be named."""
        return "a machine was named, and none is slow" if conclusion == SlowConclusion.MACHINE or machines else ""

    def problems(
        self, drill: DrillRequest, spec: JobSpec, facts: DrillFacts, reports: Sequence[IncidentReport]
    ) -> list[str]:
        """An incident must name the cause of the slowdown."""
        vote = next((report.slow for report in reports if report.slow), None)
        if vote is None:
            return ["no incident had a vote on a slow machine"]
        wrong = self.wrong_conclusion(vote.conclusion, vote.machines, spec)
        return [f"{wrong}: {vote.conclusion}: {vote.reason}"] if wrong else []


class SlowMachine(OnMachine, SlowFault):
    """The ranks of a machine get less CPU time than before."""

    name = "slow-machine"
    summary = (
        "the ranks of a machine get a part of the CPU time that they had, in a control group of their own: half of it, "
        "or as --factor says"
    )
    is_replaced: ClassVar = True

    def why_not(self) -> str:
        """Return why the control group cannot be made; empty: it can."""
        try:
            with little_cpu([], 1.0):
                return ""
        except CannotInject as error:
            return str(error)

    def wrong_conclusion(self, conclusion: object, machines: Sequence[str], spec: JobSpec) -> str:
        """The conclusion must name the machine."""
        return "" if machines == [self.struck_machine(spec)] else "the slow machine was not named"

    @asynccontextmanager
    async def slowed(self, context: DrillContext) -> AsyncIterator[None]:
        """Limit the ranks and the fork server of the machine to a part of the CPU time that they use now."""
        pids = [*await context.rank_pids(), await context.fork_server(context.target)]
        cpus = await _cpus(pids) / self.factor
        context.cluster.say(f"{context.target.name}: its ranks have {cpus:.3f} CPUs from now on")
        with little_cpu(pids, cpus):
            yield


class UnevenWork(OnRanks, SlowFault):
    """One rank always computes more than the others, and from a step on all ranks compute more."""

    name = "uneven-work"
    summary = (
        "one rank computes more than the others from the beginning, and from a step on all ranks compute more: no "
        "machine is at fault"
    )
    line = "{ranks} always computes more, and all ranks compute more"

    def load(self, at_step: int) -> list[str]:
        """More work for the rank from the beginning, and for all ranks from the step of the fault on."""
        rank = self.ranks[0] if self.ranks else 0
        heavy = [UNEVEN, str(rank), "0", str(UNEVEN_MS)]
        return [*LIGHT, *heavy, UNEVEN, "-1", str(at_step), str(round(UNEVEN_MS * self.factor))]


class SlowLink(BetweenMachines, SlowFault):
    """The link between two machines is slow."""

    name = "slow-link"
    summary = "few bytes a second pass between two machines, in network namespaces"
    needs_network = True

    def why_not(self) -> str:
        return "" if shutil.which("tc") else "there is no program tc (package iproute2)"

    @asynccontextmanager
    async def slowed(self, context: DrillContext) -> AsyncIterator[None]:
        """Limit the rate of the link."""
        first, second = self.ends(context.spec)
        with network_of(context.cluster, self.name).slow_link(first, second, LINK_BYTES / self.factor):
            yield


async def _cpus(pids: Sequence[int]) -> float:
    """Return the average number of CPUs that these processes use together."""
    before, began = sum(used(pid).cpu_s for pid in pids), time.monotonic()
    await asyncio.sleep(MEASURE_S)
    return (sum(used(pid).cpu_s for pid in pids) - before) / (time.monotonic() - began)


@contextmanager
def little_cpu(pids: Iterable[int], cpus: float) -> Iterator[None]:
    """While the block runs, limit processes and all their future children to this many CPUs together.

    Raises:
        CannotInject: the control group cannot be made.
    """
    quota = str(max(round(cpus * PERIOD_US), LEAST_US))
    is_first = (FIRST / "cpu.cfs_quota_us").exists() or FIRST.is_dir()
    limits = {"cpu.cfs_period_us": str(PERIOD_US), "cpu.cfs_quota_us": quota}
    limits = limits if is_first else {"cpu.max": f"{quota} {PERIOD_US}"}
    with process_group.made(FIRST if is_first else SECOND, limits, "with little CPU", "cpu-") as folder:
        for pid in pids:
            with suppress(ProcessLookupError):
                (folder / "cgroup.procs").write_text(str(pid))
        yield
