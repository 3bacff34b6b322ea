"""The second job of a soak, and the code for both jobs: they lease machines of one pool, and may lose machines at the
same time."""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack, suppress
from typing import Any

from controlplane.local import power
from controlplane.start_checks.code import start_recorded
from drills.clusters.local import DrillCluster
from drills.faults.lost_machines import KillMachine
from drills.inject.context import DrillContext
from drills.inject.detection import await_healed
from drills.inject.put_back import out_of_use, put_back
from drills.judge import facts as gather
from drills.judge.compare import compare
from drills.observe import step_records
from drills.observe.step_records import Records
from drills.spec.fault import STRIKE
from drills.spec.request import PACE, DrillRequest
from everstep.errors import ClusterError, EverstepError
from everstep.model.job import JobSpec
from everstep.model.job_state import JobState
from everstep.model.machine import Machine
from soaks.invariants import Struck
from soaks.job import SoakJob
from soaks.machines import machines_seen
from soaks.observe import GateObservations
from soaks.plan import SoakPlan

STRIKE_LIMIT_S = 240.0
"""The soak's job loses its machine within this time, seconds."""
STEPS = 1_000_000
"""Number of the second job's steps, so large that it does not end by itself."""
STEP_S = 0.5
"""Length of the second job's steps, seconds. They are long, since the job only has to lease machines."""
STEPS_LIMIT_S = 60.0
"""The second job runs again within this time, seconds."""
POLL_S = 0.2


class OtherJob:
    """The second job, on its own machines and without gates.

    Args:
        cluster: The open cluster.
        plan: The plan of the soak.
        name: Name of the job.
        policy: Fields of the recovery policy.
    """

    def __init__(self, cluster: DrillCluster, plan: SoakPlan, name: str, policy: dict[str, Any]) -> None:
        self.cluster = cluster
        first = plan.sizes.machines
        self.machines: list[Machine] = cluster.machines[first : first + plan.other]
        sizes = {"machines": plan.other, "ranks_per_machine": 1, "tp": 1, "pp": 1}
        base = DrillRequest(fault=KillMachine(), at_step=0, steps=STEPS, step_seconds=STEP_S, **sizes)
        spec = base.spec(name, {}, disk=cluster.home / "disk")
        self.spec: JobSpec = spec.model_copy(update={"policy": spec.policy.changed(policy)})
        self.off = ExitStack()
        """Holds its machines without power; closing it gives them power again."""
        self._rescued = Records()
        self._lost = 0
        self._with_records = {machine.name: machine for machine in self.machines}
        """Name → machine with records of the job."""

    async def start(self) -> None:
        """Submit the job, and wait until it runs.

        Raises:
            ClusterError: the job does not run.
        """
        await start_recorded(self.cluster.control, self.spec, self.machines)
        if problems := await self.await_running():
            raise ClusterError(f"the second job does not run even without a fault: {problems[0]}")

    async def lose(self, index: int) -> str:
        """Cut the power of the job's machine at this position for good; returns its name."""
        name = self.machines[index].name
        await asyncio.to_thread(self._cut_power, name)
        self._with_records.pop(name)
        self._lost += 1
        return name

    def _cut_power(self, name: str) -> None:
        cluster = self.cluster.file
        self.off.enter_context(power.powered_off(cluster, [name]))
        self._rescued.join(step_records.rescue(self.spec.name, power.state_folder(cluster, name), cluster.shm / name))
        power.empty_memory(cluster, name)
        power.empty_disk(cluster, name)

    async def await_running(self) -> list[str]:
        """Wait until the job runs, as it must after each loss; returns its problems."""
        deadline = time.monotonic() + STEPS_LIMIT_S
        state: JobState | None = None
        while time.monotonic() < deadline:
            with suppress(EverstepError):
                state = await self.cluster.control.state(self.spec.name)
                if state.outcome:
                    return [f"it is over: {state.outcome}"]
                if state.status_text == "running":
                    self.machines = state.machines
                    self._with_records |= {machine.name: machine for machine in state.machines}
                    return self._incidents(state)
            await asyncio.sleep(POLL_S)
        return [f"it does not run within {STEPS_LIMIT_S:.0f} s: it is {state.status_text if state else 'silent'}"]

    def _incidents(self, state: JobState) -> list[str]:
        """Return problems with the job's incidents: there must be one for each lost machine, and all must have
        recovered."""
        found = [f"{i.id}: {i.headline}" for i in state.incidents if i.resolution and not i.recovered]
        if state.incidents_so_far != self._lost:
            found.append(f"{state.incidents_so_far} incidents, and it lost {self._lost} machines")
        return found

    async def end(self) -> list[str]:
        """Stop the job, and compare it with an undisturbed run; returns its problems."""
        control, name, machines = self.cluster.control, self.spec.name, list(self._with_records.values())
        await control.stop(name, "the soak is over")
        await control.result(name)
        found = await step_records.collect(control.agents, name, machines, self._rescued)
        left = [f"it left {text}" for text in await gather.left_behind(self.cluster, self.spec, machines)]
        world_size = self.spec.topology().world_size
        last = [max(record.step for record in records) for records in found.of.values() if records]
        steps = min(last, default=-1) + 1
        clean = self._undisturbed(steps)
        await start_recorded(control, clean, self.machines)
        await control.result(clean.name)
        reference, _ = await gather.records(self.cluster, clean, self.machines)
        compared = compare(reference.between(0, steps), found.between(0, steps), world_size)
        if not steps or compared.losses is None:
            return [*left, "none of its losses could be compared"]
        return [*left, *compared.losses[:5], *found.overlaps()]

    def _undisturbed(self, steps: int) -> JobSpec:
        """Return this job without faults and without delays, up to the last step that it reached."""
        args = list(self.spec.args)
        args[args.index("--steps") + 1] = str(max(steps, 1))
        at = args.index(PACE)
        del args[at : at + 2]
        return self.spec.model_copy(update={"name": f"{self.spec.name}-undisturbed", "args": args})


class BothJobs:
    """The soak's job and the second job.

    Args:
        job: The soak's job.
        other: The second job; None: there is none.
    """

    def __init__(self, job: SoakJob, other: OtherJob | None) -> None:
        self.job, self.other = job, other
        self.second_job_gone: list[str] = []
        """Machines of the second job that were lost since the last gate."""

    async def strike_other(self, context: DrillContext, machine: str) -> str:
        """Cut the power of a machine of the second job as soon as the soak's job loses one; returns the problem.

        Args:
            context: Context of the fault with which the soak's job loses a machine.
            machine: ``m0`` is the second job's first machine; empty: do nothing.
        """
        self.second_job_gone = []
        if not machine or self.other is None:
            return ""
        try:
            await context.until(lambda: context.fired(STRIKE) is not None, STRIKE_LIMIT_S, "no machine was lost")
            self.second_job_gone = [await self.other.lose(int(machine.removeprefix("m")))]
        except ClusterError as error:
            return f"a machine of the second job: {error}"
        return ""

    async def observe(self, seen: GateObservations, struck: Struck) -> None:
        """Add to the observations which job has which machine, and the problems of the second job."""
        jobs = [self.job.spec.name]
        if self.other is not None:
            seen.other = await self.other.await_running()
            seen.other_ranks = self.other.spec.topology().world_size
            jobs.append(self.other.spec.name)
        out = [*struck.gone, *struck.away, *struck.second_job_gone]
        seen.machines = await machines_seen(self.job.cluster, jobs, out)

    async def put_back(self, contexts: list[DrillContext]) -> list[str]:
        """Release machines that left a job, so that the pool has them again; return problems with those that stay out
        of use."""
        for off in [*(context.off for context in contexts), *([self.other.off] if self.other else [])]:
            off.close()
        for context in contexts:
            await context.power_on()
            if context.request.opening.holds_up_backups and context.request.opening.needs_network:
                await await_healed(context)
        if not await out_of_use(self.job.cluster):
            return []
        await put_back(contexts[0])
        left = await out_of_use(self.job.cluster)
        return [f"no machine is lost: {m.machine.name} does not come back: {m.place}, {m.fault}" for m in left]
