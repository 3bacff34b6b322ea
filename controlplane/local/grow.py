"""Adds machines to a running local cluster."""

from __future__ import annotations

import signal
from dataclasses import replace

from controlplane.local import cluster_processes, ports
from controlplane.local.cluster import supervisor_of
from controlplane.local.cluster_file import ClusterFile, lock
from controlplane.local.plan import ClusterPlan, ProcessPlan
from everstep.errors import ClusterError
from everstep.model.machine import Machine
from everstep.system import private_files as private


def grow(name: str, machines: int) -> None:
    """Grow the cluster to this number of machines, without waiting until the new agents answer.

    New agents start with the options of the first agent. A second call with the same number changes nothing.

    Raises:
        ClusterError: the cluster is not up, or may not have this number of machines.
    """
    home = ClusterFile.load(name).home
    with lock(home), ports.Claims() as claims:
        cluster = ClusterFile.load(name)  # another process may have changed it before this process got the lock
        if machines > cluster.at_most:
            raise ClusterError(
                f"cluster {name!r} may have at most {cluster.at_most} machines: 'everstep up --at-most' sets the limit"
            )
        if not (supervisor := supervisor_of(home)):
            raise ClusterError(f"cluster {name!r} has no supervisor to start a machine: run 'everstep up'")
        plan, first = ClusterPlan.load(home), cluster.machines[0]
        like = next(entry for entry in plan.processes if entry.name == f"agent-{first.name}")
        for index in range(len(cluster.machines), machines):
            host = ports.machine_host(first.host, index)
            machine = Machine(name=f"m{index}", address=str(claims.choose(host, cluster.port_range)))
            private.make_folder(home / "machines" / machine.name)
            cluster.machines.append(machine)
            plan.processes.append(_agent(like, first, machine))
            plan.addresses.append(machine.address)
        plan.save(home)  # first the plan, since a machine of the cluster must be in the plan
        cluster.save()
        cluster_processes.send(supervisor, signal.SIGHUP)


def _agent(like: ProcessPlan, other: Machine, machine: Machine) -> ProcessPlan:
    """The plan of a machine's agent, made from the plan of another machine's agent."""

    def adapted(argument: str) -> str:
        if argument == other.address:
            return machine.address
        folder, slash, last = argument.rpartition("/")
        return f"{folder}{slash}{machine.name}" if last == other.name else argument

    return replace(like, name=f"agent-{machine.name}", argv=[adapted(argument) for argument in like.argv])
