"""Facts for the rules of detection: a job of two machines with one rank each, which trains without faults."""

from __future__ import annotations

from typing import Any

from everstep.decisions.detect.job_facts import JobFacts, ObservedExit, RankFacts
from everstep.model.checkpoint_policy import CheckpointPolicy
from everstep.model.job import JobSpec
from everstep.model.recovery_policy import RecoveryPolicy
from tests.rank_ends import exited

S = 10**9
POLICY = RecoveryPolicy(hang={"floor_s": 5, "factor": 10}, stop={"exit_grace_s": 60})
CHECKPOINT = CheckpointPolicy(max_unsaved_steps=100, max_unsaved_s=60.0)
RANK = RankFacts(
    rank=0,
    machine="m0",
    alive=True,
    completed_steps=20,
    steps=20,
    stepped=True,
    steps_since=10,
    in_loop=True,
    left_loop=False,
    saved_step=20,
    saved_ns=100 * S,
    first_step_ns=90 * S,
    heard_ns=100 * S,
)


def job(world_size: int = 2, policy: RecoveryPolicy = POLICY) -> JobSpec:
    return JobSpec(name="gpt", script="/job.py", machines=world_size, policy=policy, checkpoint=CHECKPOINT)


def facts(*exits: ObservedExit, world_size: int = 2, now_s: float = 100, **more: Any) -> JobFacts:
    by_rank = {seen.end.rank: seen for seen in exits}
    policy = more.pop("policy", POLICY)
    return JobFacts(job(world_size, policy), generation=3, now_ns=int(now_s * S), exits=by_rank, **more)


def seen(rank: int, *, finished: bool = False, time_s: float = 1, **end: object) -> ObservedExit:
    fields = {"rank": rank, "machine": "m0", "time_ns": int(time_s * S), **end}
    return ObservedExit(id=f"m0-{rank}", end=exited(**fields), finished=finished, heard_ns=int(time_s * S))
