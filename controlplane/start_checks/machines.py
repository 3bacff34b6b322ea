"""The choice of a job's machines: only free machines, and never a machine of another job."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence

from controlplane.client import Control
from controlplane.machine_pool import pool_state
from everstep.base.text import listed
from everstep.errors import ClusterError, ConfigError
from everstep.model.job import JobSpec
from everstep.model.machine import Machine
from everstep.model.pool import PoolMachine, PoolPlace

NAMED = 5
"""Number of machines that a message names if many are not free for the same reason."""


async def choose_machines(control: Control, spec: JobSpec, before: Collection[str] = ()) -> list[Machine]:
    """Choose machines for a job: first those in ``before``, then others, in the order of the cluster's list.

    Args:
        control: Connection to the cluster.
        spec: The job.
        before: Names of the machines of the earlier run that the job resumes.

    Raises:
        ConfigError: too few machines are free; the message explains why each other machine is not free.
        ClusterError: this connection knows no machines.
    """
    if not control.all_machines:
        raise ClusterError(
            "the machines for jobs are not known: name an inventory with --inventory or EVERSTEP_INVENTORY "
            "(docs/guides/deploy.md), or start a local cluster with 'everstep up'"
        )
    if len(control.machines) < spec.machines:
        cluster = control.cluster
        where = f"cluster {cluster.name}" if cluster else "the inventory"
        grow = f"grow it with 'everstep up --machines {spec.machines}{control.option}'" if cluster else "add some to it"
        raise ConfigError(
            f"job {spec.name} needs {spec.machines} machines, and {where} has {len(control.machines)} without the "
            f"standbys: {grow}, or run the job on fewer machines"
        )
    why_not = await _why_not(control, spec.name)
    free = [machine for machine in control.all_machines if machine.name not in why_not]
    if len(free) < spec.machines:
        count = f"{len(free) or 'none'} {'is' if len(free) < 2 else 'are'}"
        raise ConfigError(
            f"job {spec.name} needs {spec.machines} machines, and {count} free: {_reasons(why_not)}. Wait, stop a job, "
            f"release a machine ('everstep machines{control.option}' shows all), or run the job on fewer machines"
        )
    return in_order(free, spec.machines, before)


def in_order(free: Sequence[Machine], count: int, before: Collection[str]) -> list[Machine]:
    """Choose this many machines: first those in ``before``, then others; the result has the order of the list."""
    first = sorted(range(len(free)), key=lambda index: (free[index].name not in before, index))
    return [free[index] for index in sorted(first[:count])]


async def _why_not(control: Control, job: str) -> dict[str, str]:
    """Machine that is not free for the job → why."""
    running = {run.name for run in await control.jobs() if run.running} - {job}
    pool = await pool_state(control)
    if pool is not None:
        why = {name: _why(machine, running) for name, machine in pool.machines.items()}
        return {name: text for name, text in why.items() if text}
    standbys = control.all_machines[len(control.machines) :]
    why = {machine.name: "a standby" for machine in standbys}
    for other in running:
        why |= {machine.name: f"in use by job {other}" for machine in (await control.state(other)).machines}
    return why


def _why(machine: PoolMachine, running: Collection[str]) -> str:
    if machine.wanted_out:
        return f"evicted by {machine.by}"
    if machine.place is PoolPlace.ACTIVE:
        return f"in use by job {machine.job}" if machine.job in running else ""
    if machine.place not in {PoolPlace.FREE, PoolPlace.PROVISIONING}:
        return str(machine.place)
    return f"faulty ({machine.fault})" if machine.fault else ""


def _reasons(why_not: dict[str, str]) -> str:
    by_reason: dict[str, list[str]] = defaultdict(list)
    for name, why in why_not.items():
        by_reason[why].append(name)
    return "; ".join(
        f"{listed(names, NAMED)} {'is' if len(names) == 1 else 'are'} {why}" for why, names in by_reason.items()
    )
