"""Which jobs can be replayed, and which job each group of machines runs."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.decisions.blame.replay.group_jobs import no_replay, plan_of, repeats_of, shrunk, spec_of_group
from everstep.decisions.blame.replay.groups import group_size, replica_machines
from everstep.model.job import JobSpec, owner_of
from everstep.model.launch import Showing
from everstep.model.recovery_policy import RecoveryPolicy
from everstep.model.topology import Topology
from everstep.rank import environment

STEPS = Showing(kind="steps")


def job(machines: int = 8, ranks: int = 1, **more: Any) -> JobSpec:
    return JobSpec(name="gpt", script="/job.py", machines=machines, ranks_per_machine=ranks, **more)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 6), st.integers(1, 4), st.integers(1, 6))
def test_only_the_data_axes_shrink(tp: int, pp: int, replicas: int, ranks: int, shard: int) -> None:
    world = tp * pp * replicas * shard
    if world % ranks:
        return
    mesh = (("pp", pp), ("dp_replicate", replicas), ("dp_shard", shard), ("tp", tp))
    full = Topology(world // ranks, ranks, mesh)
    unit = replica_machines(full)
    small = shrunk(full, unit)
    assert (small.machines, small.size("tp"), small.size("pp")) == (unit, tp, pp)
    assert full.dp % small.dp == 0 and small.axes == full.axes
    assert shrunk(full, full.machines) == full


@given(st.integers(2, 40), st.integers(1, 3))
def test_every_planned_group_can_be_launched(machines: int, pp: int) -> None:
    spec = job(machines * pp, pp=pp)
    if no_replay(spec, STEPS):
        assert machines * pp < 2 * plan_size(spec)
        return
    plan = plan_of(spec)
    assert {spec_of_group(spec, group).machines for group in plan.groups} == {plan.size}


def plan_size(spec: JobSpec) -> int:
    return group_size(spec.machines, replica_machines(spec.topology()))


def test_each_group_runs_the_script_apart_from_the_job() -> None:
    policy = RecoveryPolicy(replay={"steps": 7, "args": ["--layers", "2"]})
    spec = job(8, 2, tp=2, pp=2, args=["--lr", "1"], policy=policy, checkpoint={"remote_url": "file:///far"})
    plan = plan_of(spec)
    assert (plan.size, plan.count) == (2, 4)
    group = plan.phases[1].groups[3]
    own = spec_of_group(spec, group)
    assert (own.name, owner_of(own.name)) == ("gpt~column-3", "gpt") and owner_of("gpt") == "gpt"
    assert own.args == ["--lr", "1", "--layers", "2"]
    assert (own.topology().tp, own.topology().pp, own.topology().dp, own.machines) == (2, 2, 1, 2)
    assert own.env[environment.REPLAY_STEPS] == "7" and own.env[environment.STATE_DIGEST] == "1"
    assert (own.checkpoint.backup, own.checkpoint.disk, own.checkpoint.remote_url) == (False, False, "")
    assert JobSpec.model_validate_json(own.model_dump_json()) == own


def test_a_mesh_stays_a_mesh() -> None:
    spec = job(8, 2, mesh={"dp_replicate": 4, "dp_shard": 2, "tp": 2}, groups="ep=4:dp_shard+tp")
    own = spec_of_group(spec, plan_of(spec).groups[0])
    assert own.topology().size("dp_shard") == 2 and own.topology().size("ep") == 4
    assert own.topology().machines == plan_of(spec).size


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (job(1), "only one machine"),
        (job(4, pp=4), "a group needs 4 of the 4 machines"),
        (job(8, pp=2, policy={"replay": {"machines": 3}}), "not a multiple of 2"),
        (job(8, policy={"replay": {"machines": 5}}), "no two groups"),
    ],
)
def test_the_reason_why_a_job_cannot_be_replayed(spec: JobSpec, why: str) -> None:
    assert why in no_replay(spec, STEPS)


def test_a_script_without_run_steps_is_not_replayed() -> None:
    assert "run.steps" in no_replay(job(), Showing(kind="calls"))
    assert no_replay(job(), STEPS) == ""


def test_the_number_of_repeats_follows_from_the_allowed_miss() -> None:
    assert repeats_of(RecoveryPolicy()) == 2
    assert repeats_of(RecoveryPolicy(replay={"fault_share": 1.0})) == 1
    assert repeats_of(RecoveryPolicy(replay={"fault_share": 0.02, "miss_probability": 0.05})) == 75


def test_a_job_cannot_have_the_name_of_a_replay() -> None:
    with pytest.raises(ValueError, match="not a job name"):
        job().model_validate({"name": "gpt~", "script": "/job.py"})
