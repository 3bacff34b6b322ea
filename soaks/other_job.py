"""A second job beside the soak's: both take their machines from one pool, and may lose some at the same time."""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack, suppress
from typing import Any

from controlplane.local import power
from controlplane.start_checks.code import start_recorded
from drills.clusters.local import DrillCluster
from drills.faults.lost_machines import KillMachine
from drills.judge import facts as gather
from drills.judge.compare import compare
from drills.observe import step_records
from drills.observe.step_records import Records
from drills.spec.request import PACE, DrillRequest
from everstep.errors import ClusterError, EverstepError
from everstep.model.job import JobSpec
from everstep.model.job_state import JobState
from everstep.model.machine import Machine
from soaks.plan import SoakPlan

STEPS = 1_000_000
"""Number of its steps, so large that it does not end by itself."""
STEP_S = 0.5
"""Length of its steps, seconds: long, since the job only has to hold machines, and two cores are few."""
STEPS_LIMIT_S = 60.0
"""It steps again within this time, seconds."""
POLL_S = 0.2


class OtherJob:
    """The second job, on its own machines and without gates.

    Args:
        cluster: Where it runs; it must be up.
        plan: Of the soak.
        name: Of the job.
        policy: Recovery policy of the soak's job.
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
        """Machines of it without power."""
        self._rescued = Records()
        self._lost = 0
        self._had = {machine.name: machine for machine in self.machines}
        """Machines that have records of it."""

    async def start(self) -> None:
        """Submit the job, and wait until it steps."""
        await start_recorded(self.cluster.control, self.spec, self.machines)
        if said := await self.goes_on():
            raise ClusterError(f"the second job does not run even without a fault: {said[0]}")

    async def lose(self, place: int) -> str:
        """Cut the power of the job's machine at this position, for good; returns its name."""
        name = self.machines[place].name
        await asyncio.to_thread(self._lose, name)
        self._had.pop(name)
        self._lost += 1
        return name

    def _lose(self, name: str) -> None:
        cluster = self.cluster.file
        self.off.enter_context(power.powered_off(cluster, [name]))
        self._rescued.join(step_records.rescue(self.spec.name, power.state_folder(cluster, name), cluster.shm / name))
        power.empty_memory(cluster, name)
        power.empty_disk(cluster, name)

    async def goes_on(self) -> list[str]:
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
                    self._had |= {machine.name: machine for machine in state.machines}
                    return self._incidents(state)
            await asyncio.sleep(POLL_S)
        return [f"it is {state.status_text if state else 'silent'} for {STEPS_LIMIT_S:.0f} s"]

    def _incidents(self, state: JobState) -> list[str]:
        """Problems with its incidents: there must be one for each lost machine, each of them recovered."""
        found = [f"{one.id}: {one.headline}" for one in state.incidents if one.resolution and not one.recovered]
        if state.incidents_so_far != self._lost:
            found.append(f"{state.incidents_so_far} incidents, and it lost {self._lost} machines")
        return found

    async def end(self) -> list[str]:
        """Stop it, and compare what it did with the same job that nobody disturbed; returns what differs."""
        control, name, had = self.cluster.control, self.spec.name, list(self._had.values())
        await control.stop(name, "the soak is over")
        await control.result(name)
        found = await step_records.collect(control.agents, name, had, self._rescued)
        said = [f"it left {text}" for text in await gather.left_behind(self.cluster, self.spec, had)]
        world_size = self.spec.topology().world_size
        last = [max(one.step for one in records) for records in found.of.values() if records]
        steps = min(last, default=-1) + 1
        clean = self._undisturbed(steps)
        await start_recorded(control, clean, self.machines)
        await control.result(clean.name)
        reference, _ = await gather.records(self.cluster, clean, self.machines)
        compared = compare(reference.between(0, steps), found.between(0, steps), world_size)
        if not steps or compared.losses is None:
            return [*said, "no loss of it could be compared"]
        return [*said, *compared.losses[:5], *found.overlaps()]

    def _undisturbed(self, steps: int) -> JobSpec:
        """Run the same job without faults, at full speed, to the step that it reached."""
        args = list(self.spec.args)
        args[args.index("--steps") + 1] = str(max(steps, 1))
        at = args.index(PACE)
        del args[at : at + 2]
        return self.spec.model_copy(update={"name": f"{self.spec.name}-undisturbed", "args": args})
