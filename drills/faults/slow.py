"""Steps that take longer: a machine with little CPU, a slow link, and uneven work."""

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
from drills.inject.context import LOOK_S, DrillContext
from drills.judge.facts import DrillFacts
from drills.observe.observed import Absorbed
from drills.spec import settings
from drills.spec.fault import LIGHT, OnMachine, OnRanks
from drills.spec.request import UNEVEN, DrillRequest
from everstep.errors import CannotInject, ClusterError
from everstep.model.incident import IncidentReport
from everstep.model.job import JobSpec
from everstep.model.slow import SlowConclusion

MEASURE_S = 3.0
"""The CPU time of ranks is measured over this time, seconds."""
UNEVEN_MS = 30
"""Additional work of one rank, milliseconds of CPU time."""
LINK_BYTES = 14e6
"""Rate of a link before it is divided by ``--factor``, bytes per second: the example exchanges 1.4 MB a step."""
FIRST, SECOND = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")
"""Folders of control groups, for both versions of cgroups."""
PERIOD_US = 20_000
"""Period of a group's CPU share, microseconds: short compared to a step, so that all of a step is slow."""
LEAST_US = 1_000
"""Smallest share that the kernel accepts, microseconds."""


class SlowFault(Fault):
    """Steps continue and take longer, until an incident names the cause."""

    not_soaked = "takes two minutes, of which a job needs one to know its own pace: the wide drills have it"
    sizes: ClassVar[dict[str, Any]] = {"machines": 4, "ranks_per_machine": 1, "tp": 1, "pp": 1}
    """Sizes with many ranks that do the same work."""
    least_step = settings.SLOW_AT
    is_slowed = True
    alone = True

    factor: float = Field(
        2.0, ge=1.5, le=20, description="Steps are to take so many times as long.", json_schema_extra={"metavar": "F"}
    )

    @property
    def absorbed(self) -> bool:
        """The job continues: no rank ends."""
        return True

    @property
    def only_reported(self) -> bool:
        """Yes, unless the machine is replaced."""
        return True

    @property
    def step_s(self) -> float:
        """Steps are shorter than in other drills, since everstep must learn the job's pace first."""
        return settings.SLOW_STEP_S

    @property
    def steps_after(self) -> int:
        """Steps until the slowdown was detected, voted on and seen to end."""
        return settings.SLOW_STEPS

    @property
    def patience(self) -> dict[str, Any]:
        return settings.SLOW_POLICY

    @asynccontextmanager
    async def slowed(self, context: DrillContext) -> AsyncIterator[None]:
        """Make steps slow while the block runs; by default the script itself does it."""
        yield

    async def strike(self, context: DrillContext) -> None:
        """Make steps slow once the job has reached the step, until an incident is over."""
        await context.reach(context.request.at_step)
        began_ns = time.time_ns()
        async with self.slowed(context):
            context.mark(self.name)
            await context.incident_over()
        if not context.request.replaces:
            context.seen.absorbed = Absorbed(began_ns, time.time_ns())

    def is_right(self, found: object, machines: Sequence[str], spec: JobSpec) -> str:
        """Why a conclusion and its machines are wrong; by default no machine may be named."""
        return "a machine was named, and none is slow" if found == SlowConclusion.MACHINE or machines else ""

    def problems(
        self, drill: DrillRequest, spec: JobSpec, facts: DrillFacts, reports: Sequence[IncidentReport]
    ) -> list[str]:
        """An incident must name the cause of the slowdown."""
        found = next((report.slow for report in reports if report.slow), None)
        if found is None:
            return ["no incident looked for a slow machine"]
        wrong = self.is_right(found.conclusion, found.machines, spec)
        return [f"{wrong}: {found.conclusion}: {found.reason}"] if wrong else []


class SlowMachine(OnMachine, SlowFault):
    """The ranks of a machine get less CPU time."""

    name = "slow-machine"
    summary = (
        "a machine's ranks have a share of the CPU time that they had, in a group of processes of their own: "
        "half of it unless --factor says otherwise"
    )

    def why_not(self) -> str:
        """Why the control group cannot be made; empty: it can."""
        try:
            with little_cpu([], 1.0):
                return ""
        except CannotInject as error:
            return str(error)

    @property
    def is_replaced(self) -> bool:
        """Yes: the machine is slow compared to its own past."""
        return True

    def is_right(self, found: object, machines: Sequence[str], spec: JobSpec) -> str:
        """The conclusion must name the machine."""
        return "" if machines == [self.struck_machine(spec)] else "the slow machine was not named"

    @asynccontextmanager
    async def slowed(self, context: DrillContext) -> AsyncIterator[None]:
        """Move the ranks and the fork server into a control group with a part of their CPU time."""
        pids = [*await _ranks(context), await context.fork_server(context.target)]
        cpus = await _cpus(pids) / self.factor
        context.cluster.say(f"{context.target.name}: its ranks have {cpus:.3f} CPUs from now on")
        with little_cpu(pids, cpus):
            yield


class UnevenWork(OnRanks, SlowFault):
    """A rank has more to do than the others."""

    name = "uneven-work"
    summary = (
        "a rank has more to do than the others from the first step on, and all have more from a step on: of no machine"
    )
    line = "{ranks} always computes more; all compute more"

    def load(self, at_step: int) -> list[str]:
        """More work for the rank from the first step on, and for all ranks from a later step on."""
        rank = self.ranks[0] if self.ranks else 0
        heavy = [UNEVEN, str(rank), "0", str(UNEVEN_MS)]
        return [*LIGHT, *heavy, UNEVEN, "-1", str(at_step), str(round(UNEVEN_MS * self.factor))]


class SlowLink(BetweenMachines, SlowFault):
    """A link between two machines is slow."""

    name = "slow-link"
    summary = "few bytes a second pass between two machines, in network namespaces"
    needs_network = True

    def why_not(self) -> str:
        """Why links cannot be made slow; empty: the program for it is installed."""
        return "" if shutil.which("tc") else "there is no program tc (package iproute2)"

    @asynccontextmanager
    async def slowed(self, context: DrillContext) -> AsyncIterator[None]:
        """Limit the rate of the link."""
        one, other = self.ends(context.spec)
        with network_of(context.cluster, self.name).slow_link(one, other, LINK_BYTES / self.factor):
            yield


async def _ranks(context: DrillContext) -> list[int]:
    """Pids of the ranks on the struck machine."""
    wanted = context.spec.topology().ranks(context.machines.index(context.target))
    async with context.cluster.control.feed(context.spec.name, context.machines, LOOK_S) as feed:
        async for picture in feed.pictures():
            if all(rank in picture.ranks for rank in wanted):
                return [picture.ranks[rank].pid for rank in wanted]
    raise ClusterError(f"the ranks of {context.target.name} are not there")


async def _cpus(pids: Sequence[int]) -> float:
    """The average number of CPUs that some processes use."""
    before, began = sum(used(pid).cpu_s for pid in pids), time.monotonic()
    await asyncio.sleep(MEASURE_S)
    return (sum(used(pid).cpu_s for pid in pids) - before) / (time.monotonic() - began)


@contextmanager
def little_cpu(pids: Iterable[int], cpus: float) -> Iterator[None]:
    """Limit processes, and all that they start, to this many CPUs together while the block runs.

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
