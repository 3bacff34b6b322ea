"""Faults that cut the power of machines, which lose all their data. They come back empty, or are replaced."""

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
from drills.inject.context import POLL_S, DrillContext
from drills.inject.detection import await_reason
from drills.spec.fault import STRIKE, WITH_EVICTION, WITH_RESTORE, Entry, OnMachine
from drills.spec.job_options import JobOptions
from drills.spec.loss import Loss
from everstep.errors import ClusterError, ConfigError, EverstepError
from everstep.model.job import JobSpec
from everstep.model.pool import PoolMachine, PoolPlace
from everstep.model.topology import AXES, Topology
from everstep.rank import drill_faults as faults

HOLD = "standby"
"""Id of the hold in which the incident waits while the chosen standby is lost."""
SICK = "gpu-lost"
"""Reason code of the finding about a sick standby."""
CHOSEN_LIMIT_S = 90.0
"""The incident has chosen a replacement, or waits for one, within this time, seconds."""


class LostMachines(Fault):
    """Machines lose power: all their processes end, and their memory and disks are lost."""

    meets = "opening"
    shared_disk = True
    takes_machines = True

    gone: bool = Field(False, description="They do not come back, and are replaced.")
    standby: Literal["", "sick", "dies", "late"] = Field(
        "",
        description="With --gone: the replacement is faulty (sick), is lost while it is prepared (dies), or is there "
        "only once the job waits for it (late).",
    )

    def refuse(self, drill: JobOptions, spec: JobSpec) -> None:
        """Refuse ``--standby`` if no machine is replaced."""
        super().refuse(drill, spec)
        if self.standby and not self.gone:
            raise ConfigError(f"--standby needs {self.name} --gone: otherwise no machine is replaced")

    @property
    def marks(self) -> tuple[str, ...]:
        return (STRIKE,)

    def machines_lost(self, spec: JobSpec) -> set[int]:
        """Return the positions of the lost machines in the job."""
        raise NotImplementedError

    def loss(self, spec: JobSpec) -> Loss:
        return Loss(tuple(sorted(self.machines_lost(spec))))

    @property
    def stays_away(self) -> bool:
        return self.gone

    @property
    def parked_for_a_while(self) -> bool:
        """The job is parked until a late replacement is there."""
        return self.standby == "late"

    @property
    def strike_delay(self) -> int | None:
        """The job waits while an inspection detects the sick standby."""
        return 0 if self.standby == "sick" else None

    @property
    def stages(self) -> Sequence[str]:
        return WITH_EVICTION if self.gone else WITH_RESTORE

    def leaving(self, spec: JobSpec) -> list[str]:
        return [f"m{index}" for index in self.loss(spec).machines] if self.gone else []

    @property
    def standby_is_lost(self) -> bool:
        return self.standby == "dies"

    def worker_entries(self, spec: JobSpec, plan: Path, processes: Callable[[], Mapping[str, int]]) -> list[Entry]:
        """Return a hold in the stage that prepares the standby, so that the standby can be lost there."""
        if self.standby != "dies":
            return []
        stage = {"job": spec.name, "in_stage": "prepare", "moment": "begin"}
        return [{"id": HOLD, "fault": "hold", **stage, "until": f"{plan}.standby"}]

    async def strike(self, context: DrillContext) -> None:
        """Cut the machines' power; before or after that, do what ``--standby`` asks for."""
        await context.reach(context.request.at_step)
        if self.standby == "sick":
            await _make_standby_sick(context)
        elif self.standby == "late":
            for spare in await _spare_machines(context):
                await move_machine(context.cluster.control, "evict", spare.machine.name, "the drill empties the pool")
        await context.second_fault(exact=False)
        if self.standby == "dies":
            await _lose_standby(context)
        elif self.standby == "late":
            await _release_late(context)

    @classmethod
    def draw(cls, rng: Random, topology: Topology, *, alone: bool) -> dict[str, Any]:
        """Draw the options; in half of the episodes the machines stay away."""
        drawn = super().draw(rng, topology, alone=alone)
        return drawn | ({"gone": True} if rng.random() < 0.5 else {})


class KillMachine(OnMachine, LostMachines):
    """One machine is lost."""

    name = "kill-machine"
    summary = "SIGKILL of all processes of a machine, which comes back empty, or not at all"
    line = "{loss}"

    def machines_lost(self, spec: JobSpec) -> set[int]:
        return {self.machine_index(spec)}


class KillGroup(LostMachines):
    """All machines of a parallel group are lost at once."""

    name = "kill-group"
    summary = "SIGKILL of all processes of all machines of a parallel group at once"
    line = "{kind} group {index}: {loss}"

    kind: str = Field(
        description="Kind of the group: an axis of the mesh, or the name of a group that was defined over several "
        "axes, such as ep.",
        json_schema_extra={"metavar": "AXIS"},
    )
    index: int = Field(
        0, ge=0, description="Number of the group of this kind, from 0 on.", json_schema_extra={"metavar": "I"}
    )

    def refuse(self, drill: JobOptions, spec: JobSpec) -> None:
        """Refuse a group that the job does not have."""
        super().refuse(drill, spec)
        topology = spec.topology()
        if self.kind not in topology.kinds:
            raise ConfigError(f"--kind {self.kind}: use one of {', '.join(topology.kinds)}")
        if self.index >= (count := len(topology.groups(self.kind))):
            raise ConfigError(f"--index {self.index} does not exist: {self.kind} groups go from 0 to {count - 1}")

    def named_machines(self, topology: Topology) -> set[int]:
        """Return the positions of the machines that have a rank of the group."""
        return {topology.machine(rank) for rank in topology.groups(self.kind)[self.index]}

    def machines_lost(self, spec: JobSpec) -> set[int]:
        return self.named_machines(spec.topology())

    @classmethod
    def draw(cls, rng: Random, topology: Topology, *, alone: bool) -> dict[str, Any]:
        kind = rng.choice(AXES)
        group = {"kind": kind, "index": rng.randrange(len(topology.groups(kind)))}
        return group | super().draw(rng, topology, alone=alone)


async def _make_standby_sick(context: DrillContext) -> None:
    """Give a fault to the spare machine that the pool leases first, and wait until an inspection detects it."""
    first = (await _spare_machines(context))[0].machine
    context.seen.standby = first.name
    context.off.callback(write_fake_gpus, context, first.name, {})
    write_fake_gpus(context, first.name, FAKE_GPUS[SICK])
    await await_reason(context, [first], SICK)


async def _lose_standby(context: DrillContext) -> None:
    """Cut the power of the chosen standby while it is prepared."""
    hold = next(entry for entry in context.planned.workers if entry["id"] == HOLD)
    try:
        await context.until(
            lambda: faults.fired(context.planned.worker_plan, hold) is not None,
            CHOSEN_LIMIT_S,
            "no replacement was prepared",
        )
        context.seen.standby = await _chosen_standby(context)
        await asyncio.to_thread(_cut_power, context, context.seen.standby)
    finally:
        await asyncio.to_thread(Path(hold["until"]).touch)


async def _release_late(context: DrillContext) -> None:
    """Release one of the machines that were evicted, once the job waits for a machine."""
    await _await_parked(context)
    state = await pool_state(context.cluster.control)
    cordoned = [m for m in state.machines.values() if m.place is PoolPlace.CORDONED] if state else []
    for entry in cordoned[:1]:
        await move_machine(context.cluster.control, "release", entry.machine.name, "the job waits for it")


async def _spare_machines(context: DrillContext) -> list[PoolMachine]:
    """Return the spare machines, in the order in which the pool leases them.

    Raises:
        ClusterError: there is no spare machine.
    """
    state = await pool_state(context.cluster.control)
    machines = state.machines.values() if state else []
    spare = [m for m in machines if m.place in {PoolPlace.STANDBY, PoolPlace.FREE} and not m.fault]
    if not spare:
        raise ClusterError("the pool has no spare machine, and this drill needs one")
    return sorted(spare, key=lambda m: (m.place is not PoolPlace.STANDBY, m.machine.name))


async def _chosen_standby(context: DrillContext) -> str:
    """Return the machine that the pool has leased to the job as a replacement.

    Raises:
        ClusterError: the pool has leased none within the time limit.
    """
    job, first_machines = context.spec.name, {machine.name for machine in context.machines}
    deadline = time.monotonic() + CHOSEN_LIMIT_S
    while time.monotonic() < deadline:
        state = await pool_state(context.cluster.control)
        for name, entry in state.machines.items() if state else ():
            if entry.place is PoolPlace.ACTIVE and entry.job == job and name not in first_machines:
                return name
        await asyncio.sleep(POLL_S)
    raise ClusterError(f"the pool leased no replacement to the job within {CHOSEN_LIMIT_S:.0f} s")


def _cut_power(context: DrillContext, machine: str) -> None:
    context.off.enter_context(power.powered_off(context.cluster.file, [machine]))
    power.empty_memory(context.cluster.file, machine)


async def _await_parked(context: DrillContext) -> None:
    """Wait until the job is parked, since the pool has no machine for it.

    Raises:
        ClusterError: the job is not parked within the time limit.
    """
    deadline = time.monotonic() + CHOSEN_LIMIT_S
    while time.monotonic() < deadline:
        with suppress(EverstepError):  # the fault may have struck the control plane
            if (await context.cluster.control.state(context.spec.name)).status == "parked":
                return
        await asyncio.sleep(POLL_S)
    raise ClusterError(f"the job was not parked within {CHOSEN_LIMIT_S:.0f} s although the pool has no spare machine")
