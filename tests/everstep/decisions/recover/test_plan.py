"""What is done about a stopped job, as one decision."""

from __future__ import annotations

from typing import Any

import pytest

from everstep.decisions.recover.plan import RestartPlan, plan_restart
from everstep.decisions.recover.rules import NOT_OVERRULED, PARK_WHEN, Action
from everstep.decisions.recover.state import RecoveryState
from everstep.model.checkpoint_policy import CheckpointPolicy
from everstep.model.incident import Anomaly, Evidence, Failure, RankExit, StateCopy, Symptom, Tier, Unlisted
from everstep.model.job import JobSpec
from everstep.model.machine import Machine

MACHINES = [Machine(name=f"m{index}", address=f"127.0.0.1{index}:1") for index in range(2)]
ON_DISK = CheckpointPolicy(disk=True, disk_path="/disk", disk_every_steps=5)


def state(**fields: Any) -> RecoveryState:
    given: dict[str, Any] = {
        "spec": JobSpec(name="job", script="/job.py", machines=2, ranks_per_machine=1),
        "machines": MACHINES,
        "anomaly": Anomaly(id="m0-1", generation=1, symptom=Symptom.CRASH, headline="seen"),
        "generation": 1,
        "resume_step": 0,
        "lineage": [(1, 0)],
        "failures": [Failure(generation=1, step=21, symptom=Symptom.CRASH, cause="SIGKILL")],
    }
    return RecoveryState(**(given | fields))


def evidence(step: int = 20, **fields: Any) -> Evidence:
    exits = [RankExit(rank=rank, machine=f"m{rank}", signal=9, completed_steps=21) for rank in range(2)]
    held = [StateCopy(rank=rank, machine=f"m{rank}", completed_steps=step, generation=1) for rank in range(2)]
    return Evidence(**({"generation": 1, "exits": exits, "held": held} | fields))


def said(plan: RestartPlan) -> tuple[Action, str]:
    return plan.action, plan.verdict.rule


def test_a_crash_is_reattempted_where_all_ranks_can_go_on() -> None:
    plan = plan_restart(evidence(), state())
    assert said(plan) == (Action.REATTEMPT, "")
    assert (plan.restore.step, plan.verdict.delay_s, plan.doubt) == (20, 0.0, None)
    assert plan.text.startswith("reattempt from step 20: SIGKILL: assume a transient fault (step 20 is")


def test_the_rule_that_parks_is_named() -> None:
    plan = plan_restart(evidence(unreachable=["m1"]), state())
    assert said(plan) == (Action.PARK, "machine_silent")
    assert plan.verdict.silent == ("m1",)
    assert plan.text == "park: m1 does not answer: bring its agent back, the job goes on by itself then"


def lost() -> tuple[Evidence, RecoveryState]:
    """m1 came back empty, and its disk does not answer."""
    unlisted = [Unlisted(tier=Tier.DISK, machines=["m1"], reason="no answer")]
    found = evidence(emptied=["m1"], searched=True, unlisted=unlisted)
    kept = found.model_copy(update={"held": found.held[:1], "exits": found.exits[:1]})
    return kept, state(spec=state().spec.model_copy(update={"checkpoint": ON_DISK}), emptied={"m1"})


def test_what_may_be_newer_is_asked_for_first_and_then_parks() -> None:
    found, known = lost()
    plan = plan_restart(found, known)
    assert plan.action is Action.ASK and plan.doubt is not None and plan.doubt.unlisted
    known.asked = known.spec.policy.storage_tries
    plan = plan_restart(found, known)
    assert said(plan) == (Action.PARK, "newer_may_exist")
    assert plan.doubt is not None


def test_an_operator_who_accepts_the_loss_lets_it_go_on() -> None:
    found, known = lost()
    known.asked = known.spec.policy.storage_tries
    parked = plan_restart(found, known)
    assert parked.doubt is not None
    known.accept(parked.restore, parked.doubt, "ann")
    plan = plan_restart(found, known, by_operator=True)
    assert said(plan) == (Action.REATTEMPT, "") and plan.by_operator


@pytest.mark.parametrize("fields", [{"hold": "closed from outside"}, {"attempts": 99}])
def test_an_operator_overrules_what_judges(fields: dict[str, Any]) -> None:
    assert plan_restart(evidence(), state(**fields)).action is Action.PARK
    plan = plan_restart(evidence(), state(**fields), by_operator=True)
    assert plan.action is Action.REATTEMPT and plan.by_operator
    assert (plan.verdict.reason, plan.verdict.delay_s) == ("an operator says so", 0.0)


def test_an_operator_cannot_overrule_what_is_not_possible() -> None:
    silent = plan_restart(evidence(unreachable=["m1"]), state(), by_operator=True)
    assert said(silent) == (Action.PARK, "machine_silent") and not silent.by_operator
    stuck = StateCopy(rank=1, machine="m0", completed_steps=20, tier=Tier.BACKUP, valid=False, reason="no room")
    found = evidence(held=[])
    plan = plan_restart(found, state(unreached=[stuck], bad=[stuck]), by_operator=True, certain=True)
    assert said(plan) == (Action.PARK, "copies_out_of_reach")
    assert set(PARK_WHEN) >= NOT_OVERRULED
