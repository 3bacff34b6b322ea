"""Operations on both jobs of a soak: their machines, losses of machines, and returns to the pool."""

from __future__ import annotations

from drills.inject.context import DrillContext
from drills.inject.detection import await_healed
from drills.inject.put_back import out_of_use, put_back
from drills.spec.fault import STRIKE
from everstep.errors import ClusterError
from soaks.invariants import Struck
from soaks.job import SoakJob
from soaks.look import GateLook
from soaks.machines import machines_seen
from soaks.other_job import OtherJob

STRIKE_LIMIT_S = 240.0
"""The soak's job has lost its machine within this time, seconds."""


class BothJobs:
    """The soak's job and the second job.

    Args:
        job: Job of the soak.
        other: The second job; None: there is none.
    """

    def __init__(self, job: SoakJob, other: OtherJob | None) -> None:
        self.job, self.other = job, other
        self.others_gone: list[str] = []
        """Machines of the other job that were lost since the last gate."""

    async def strike_other(self, context: DrillContext, place: str) -> str:
        """Kill a machine of the second job as soon as the soak's job loses one; returns problems.

        Args:
            context: Context of the fault that kills a machine of the soak's job.
            place: ``m0`` is the second job's first machine; empty: none is killed.
        """
        self.others_gone = []
        if not place or self.other is None:
            return ""
        try:
            await context.until(lambda: context.fired(STRIKE) is not None, STRIKE_LIMIT_S, "no machine was lost")
            self.others_gone = [await self.other.lose(int(place.removeprefix("m")))]
        except ClusterError as error:
            return f"a machine of the other job: {error}"
        return ""

    async def see(self, seen: GateLook, struck: Struck) -> None:
        """Record which job has each machine, and the problems of the second job."""
        jobs = [self.job.spec.name]
        if self.other is not None:
            seen.other = await self.other.goes_on()
            seen.beside = self.other.spec.topology().world_size
            jobs.append(self.other.spec.name)
        out = [*struck.gone, *struck.away, *struck.others_gone]
        seen.machines = await machines_seen(self.job.cluster, jobs, out)

    async def put_back(self, scenes: list[DrillContext]) -> list[str]:
        """Return machines that left a job to the pool; returns those that fail to return."""
        for off in [*(context.off for context in scenes), *([self.other.off] if self.other else [])]:
            off.close()
        for context in scenes:
            await context.power_on()
            if context.request.opening.holds_up_backups and context.request.opening.needs_network:
                await await_healed(context)
        if not await out_of_use(self.job.cluster):
            return []
        await put_back(scenes[0])
        left = await out_of_use(self.job.cluster)
        return [f"no machine is lost: {one.machine.name} does not come back: {one.place}, {one.fault}" for one in left]
