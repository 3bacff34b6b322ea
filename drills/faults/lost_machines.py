"""Machines lose power with all their data: they come back empty, or stay away and are replaced."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any, Literal

from pydantic import Field

from controlplane.local import power
from controlplane.machine_pool import move_machine, pool_state
from drills.faults.devices import FAKE_GPUS, write_fake_gpus
from drills.faults.fault import Fault
from drills.inject.context import LOOK_S, DrillContext
from drills.inject.found import await_reason
from drills.spec.fault import STRIKE, WITH_EVICTION, WITH_RESTORE, Entry, OnMachine
from drills.spec.job_options import JobOptions
from drills.spec.loss import Loss
from everstep.errors import ClusterError, ConfigError, EverstepError
from everstep.model.job import JobSpec
from everstep.model.pool import PoolMachine, PoolPlace
from everstep.model.topology import AXES, Topology
from everstep.rank import drill_faults as faults

HOLD = "standby"
"""Id of the hold during which the chosen standby is lost."""
SICK = "gpu-lost"
"""Reason code of a sick standby's fault."""
CHOSEN_LIMIT_S = 90.0
"""The incident has a machine, or waits for one, within this time, seconds."""


class LostMachines(Fault):
    """Machines lose power: all their processes die, and their memory and disks are lost."""

    meets = "opening"
    shared_disk = True
    takes_machines = True

    gone: bool = Field(False, description="They do not come back; others take their places.")
    standby: Literal["", "sick", "dies", "late"] = Field(
        "",
        description="With --gone: the machine that is to take the place is found faulty, is lost while it is made "
        "ready, or is there only once the job waits for it.",
    )

    def refuse(self, drill: JobOptions, spec: JobSpec) -> None:
        """Refuse ``--standby`` if no machine is replaced."""
        super().refuse(drill, spec)
        if self.standby and not self.gone:
            raise ConfigError(f"--standby goes with {self.name} --gone: nobody is replaced else")

    @property
    def marks(self) -> tuple[str, ...]:
        """The fault itself is the strike."""
        return (STRIKE,)

    def machines_lost(self, spec: JobSpec) -> set[int]:
        """Positions of the lost machines in the job."""
        raise NotImplementedError

    def loss(self, spec: JobSpec) -> Loss:
        return Loss(tuple(sorted(self.machines_lost(spec))))

    @property
    def stays_away(self) -> bool:
        return self.gone

    @property
    def parked_for_a_while(self) -> bool:
        """The job is parked for a while if a machine arrives late."""
        return self.standby == "late"

    @property
    def strike_delay(self) -> int | None:
        """The job waits at the step while an inspection detects the sick standby."""
        return 0 if self.standby == "sick" else None

    @property
    def stages(self) -> Sequence[str]:
        """The stages of an incident after a loss of memory, or of a machine for good."""
        return WITH_EVICTION if self.gone else WITH_RESTORE

    def leaving(self, spec: JobSpec) -> list[str]:
        """The machines that do not come back."""
        return [f"m{index}" for index in self.loss(spec).machines] if self.gone else []

    @property
    def standby_is_lost(self) -> bool:
        return self.standby == "dies"

    def worker_entries(self, spec: JobSpec, plan: Path, processes: Callable[[], Mapping[str, int]]) -> list[Entry]:
        """A hold in the stage that prepares the standby, so that the standby can die there."""
        if self.standby != "dies":
            return []
        place = {"job": spec.name, "in_stage": "prepare", "moment": "begin"}
        return [{"id": HOLD, "fault": "hold", **place, "until": f"{plan}.standby"}]

    async def strike(self, context: DrillContext) -> None:
        """Kill the machines; before and after, apply the fault of the standby, if any."""
        await context.reach(context.request.at_step)
        if self.standby == "sick":
            await _falls_sick(context)
        elif self.standby == "late":
            for one in await _spare(context):
                await move_machine(context.cluster.control, "evict", one.machine.name, "the drill wants the pool empty")
        await context.second_fault(exact=False)
        if self.standby == "dies":
            await _dies(context)
        elif self.standby == "late":
            await _comes_late(context)

    @classmethod
    def draw(cls, rng: Random, topology: Topology, *, alone: bool) -> dict[str, Any]:
        """Draw a machine, which stays away half of the time."""
        drawn = super().draw(rng, topology, alone=alone)
        return drawn | ({"gone": True} if rng.random() < 0.5 else {})


class KillMachine(OnMachine, LostMachines):
    """One machine is lost."""

    name = "kill-machine"
    summary = "SIGKILL of everything of a machine, which comes back empty, or not at all"
    line = "{loss}"

    def machines_lost(self, spec: JobSpec) -> set[int]:
        return {self.machine_index(spec)}


class KillGroup(LostMachines):
    """All machines of a parallel group are lost at once."""

    name = "kill-group"
    summary = "the same to all machines of a parallel group at once"
    line = "{kind} group {index}: {loss}"

    kind: str = Field(
        description="An axis of the mesh, or a group laid over it.", json_schema_extra={"metavar": "AXIS"}
    )
    index: int = Field(0, ge=0, description="Which group of that kind.", json_schema_extra={"metavar": "I"})

    def refuse(self, drill: JobOptions, spec: JobSpec) -> None:
        """Refuse a group that the job does not have."""
        super().refuse(drill, spec)
        topology = spec.topology()
        if self.kind not in topology.kinds:
            raise ConfigError(f"--kind {self.kind}: use one of {', '.join(topology.kinds)}")
        if self.index >= (count := len(topology.groups(self.kind))):
            raise ConfigError(f"--index {self.index} does not exist: {self.kind} groups go from 0 to {count - 1}")

    def named_machines(self, topology: Topology) -> set[int]:
        """All machines that have a rank of the group."""
        return {topology.machine(rank) for rank in topology.groups(self.kind)[self.index]}

    def machines_lost(self, spec: JobSpec) -> set[int]:
        """The machines of the group."""
        return self.named_machines(spec.topology())

    @classmethod
    def draw(cls, rng: Random, topology: Topology, *, alone: bool) -> dict[str, Any]:
        kind = rng.choice(AXES)
        group = {"kind": kind, "index": rng.randrange(len(topology.groups(kind)))}
        return group | super().draw(rng, topology, alone=alone)


async def _falls_sick(context: DrillContext) -> None:
    """Make the first spare machine sick, and wait until an inspection detects it."""
    first = (await _spare(context))[0].machine
    context.seen.standby = first.name
    context.off.callback(write_fake_gpus, context, first.name, {})
    write_fake_gpus(context, first.name, FAKE_GPUS[SICK])
    await await_reason(context, [first], SICK)


async def _dies(context: DrillContext) -> None:
    """Kill the chosen machine too, while it is prepared."""
    hold = next(fault for fault in context.planned.workers if fault["id"] == HOLD)
    try:
        await context.until(
            lambda: faults.fired(context.planned.worker_plan, hold) is not None,
            CHOSEN_LIMIT_S,
            "no machine was made ready in the place of the lost one",
        )
        context.seen.standby = await _chosen(context)
        await asyncio.to_thread(_lose, context, context.seen.standby)
    finally:
        await asyncio.to_thread(Path(hold["until"]).touch)


async def _comes_late(context: DrillContext) -> None:
    """Make a machine available again once the job waits for it."""
    await _parked(context)
    state = await pool_state(context.cluster.control)
    cordoned = [one for one in state.machines.values() if one.place is PoolPlace.CORDONED] if state else []
    for one in cordoned[:1]:
        await move_machine(context.cluster.control, "release", one.machine.name, "the drill has waited")


async def _spare(context: DrillContext) -> list[PoolMachine]:
    """Spare machines, in the order in which the pool leases them.

    Raises:
        ClusterError: there is none.
    """
    state = await pool_state(context.cluster.control)
    known = state.machines.values() if state else []
    spare = [one for one in known if one.place in {PoolPlace.STANDBY, PoolPlace.FREE} and not one.fault]
    if not spare:
        raise ClusterError("no machine is to spare: the pool was to have one")
    return sorted(spare, key=lambda one: (one.place is not PoolPlace.STANDBY, one.machine.name))


async def _chosen(context: DrillContext) -> str:
    """The machine that the pool has leased to the job as a replacement."""
    job, had = context.spec.name, {machine.name for machine in context.machines}
    deadline = time.monotonic() + CHOSEN_LIMIT_S
    while time.monotonic() < deadline:
        state = await pool_state(context.cluster.control)
        for name, one in state.machines.items() if state else ():
            if one.place is PoolPlace.ACTIVE and one.job == job and name not in had:
                return name
        await asyncio.sleep(LOOK_S)
    raise ClusterError("the pool gave the job no machine in the place of the lost one")


def _lose(context: DrillContext, machine: str) -> None:
    context.off.enter_context(power.powered_off(context.cluster.file, [machine]))
    power.empty_memory(context.cluster.file, machine)


async def _parked(context: DrillContext) -> None:
    """Wait until the job waits for a machine.

    Raises:
        ClusterError: it does not.
    """
    deadline = time.monotonic() + CHOSEN_LIMIT_S
    while time.monotonic() < deadline:
        with suppress(EverstepError):  # the fault may have struck the control plane
            if (await context.cluster.control.state(context.spec.name)).status == "parked":
                return
        await asyncio.sleep(LOOK_S)
    raise ClusterError(f"the job was not parked within {CHOSEN_LIMIT_S:.0f} s although no machine is to spare")
