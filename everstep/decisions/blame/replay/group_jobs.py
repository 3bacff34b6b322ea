"""Decides whether a job can be replayed, in which groups, and what each group runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import gcd, prod

from everstep.decisions.blame.replay.compare_groups import TRIES
from everstep.decisions.blame.replay.groups import ReplayGroup, ReplayPlan, group_size, plan_replay, replica_machines
from everstep.decisions.blame.replay.suspects import runs_needed
from everstep.errors import TopologyError
from everstep.model.job import JobSpec, replay_name
from everstep.model.launch import Showing
from everstep.model.recovery_policy import RecoveryPolicy
from everstep.model.replay import GroupRun, RunEnd
from everstep.model.topology import Topology
from everstep.rank import environment


def shrunk(topology: Topology, machines: int) -> Topology:
    """Return the topology with fewer machines: the data axes shrink, the outermost axis first.

    Raises:
        TopologyError: the sizes of the data axes do not allow this number of machines.
    """
    data = topology.data_axes
    rest = prod(size for axis, size in topology.mesh if axis not in data)
    ranks = machines * topology.ranks_per_machine
    if ranks % rest:
        raise TopologyError(f"complete replicas of the model cannot fill {machines} machines")
    left, sizes = ranks // rest, dict(topology.mesh)
    for axis in data[:0:-1]:
        sizes[axis] = gcd(sizes[axis], left)
        left //= sizes[axis]
    if left > sizes.get(data[0] if data else "", 1):
        raise TopologyError(f"the data axes of {topology.text} cannot shrink to {machines} machines")
    sizes |= dict.fromkeys(data[:1], left)
    return replace(topology, machines=machines, mesh=tuple(sizes.items()))


def no_replay(spec: JobSpec, showing: Showing) -> str:
    """Return why a job cannot be replayed, in words; empty if it can."""
    if spec.machines < 2:
        return "the job has only one machine, which cannot be compared"
    if showing.kind != "steps":
        return "the script does not run its steps in run.steps, so a replay would not know after which step it ends"
    try:
        plan_of(spec)
    except TopologyError as error:
        return str(error)
    return ""


def plan_of(spec: JobSpec) -> ReplayPlan:
    """Return the groups in which a job is replayed.

    Raises:
        TopologyError: the machines are too few for two groups, or groups of this size are not possible.
    """
    topology, wanted = spec.topology(), spec.policy.replay.machines
    unit = replica_machines(topology)
    size = wanted or group_size(topology.machines, unit)
    if size % unit:
        raise TopologyError(f"replay.machines is {size}, which is not a multiple of {unit}")
    if size * 2 > topology.machines:
        raise TopologyError(
            f"a group needs {size} of the {topology.machines} machines: there are no two groups to compare"
        )
    shrunk(topology, size)
    return plan_replay(topology.machines, size)


def repeats_of(policy: RecoveryPolicy, runs: Iterable[GroupRun] = (), *, seen: bool = False) -> int:
    """Return how often both phases are run as long as they name no machine.

    In each repeat, a machine takes part in two trials: one in each phase.

    Args:
        policy: The policy, with the required certainty.
        runs: The trials so far. If a group did not start, there is a second repeat.
        seen: Whether groups showed a fault that names no machine yet. The fault has to show in a row and in a
            column. So the row and the column may each miss it with at most half of the permitted probability.
    """
    repeats = -(-runs_needed(policy.replay.fault_share, policy.replay.miss_probability) // 2)
    again = seen or any(run.end is RunEnd.NOT_STARTED for run in runs)
    named = runs_needed(policy.replay.fault_share, policy.replay.miss_probability / 2) if seen else 1
    return max(repeats, named, TRIES if again else 1)


def spec_of_group(spec: JobSpec, group: ReplayGroup) -> JobSpec:
    """Return the job that a group runs: the same script with less data parallelism, for some steps from its beginning.

    It has its own name and keeps no checkpoints, so that it changes no data of the job.
    """
    small = shrunk(spec.topology(), len(group.machines))
    sizes: dict[str, object] = {"machines": small.machines}
    if spec.mesh:
        sizes["mesh"] = small.mesh
    env = {environment.REPLAY_STEPS: str(spec.policy.replay.steps), environment.STATE_DIGEST: "1"}
    no_checkpoints = {"backup": False, "disk": False, "remote_url": ""}
    return spec.model_copy(
        update={
            **sizes,
            "name": replay_name(spec.name, group.name),
            "args": [*spec.args, *spec.policy.replay.args],
            "env": {**spec.env, **env},
            "checkpoint": spec.checkpoint.model_copy(update=no_checkpoints),
        }
    )
