"""What is done about a stopped job, as one decision."""

from __future__ import annotations

from typing import Any

import pytest

from everstep.decisions.act.recover.climbed import Climbed
from everstep.decisions.act.recover.incident_state import IncidentState
from everstep.decisions.act.recover.plan import RestartPlan, plan_restart
from everstep.decisions.act.recover.rules import Action
from everstep.decisions.act.versions.book import VersionBook
from everstep.model.checkpoint_policy import CheckpointPolicy
from everstep.model.evidence import Evidence, RankExit, Unlisted
from everstep.model.finding import Finding, MachineFinding
from everstep.model.incident import Anomaly, Failure, Symptom
from everstep.model.job import JobSpec
from everstep.model.ladder import Rung, RungMode
from everstep.model.launch import Showing
from everstep.model.machine import Machine
from everstep.model.recovery_policy import RecoveryPolicy
from everstep.model.state_copy import StateCopy, Tier
from everstep.model.version import CodeVersion, JobVersion, VersionStatus

MACHINES = [Machine(name=f"m{index}", address=f"127.0.0.1{index}:1") for index in range(2)]
ON_DISK = CheckpointPolicy(disk=True, disk_path="/disk", disk_every_steps=5)


def state(**fields: Any) -> IncidentState:
    given: dict[str, Any] = {
        "spec": JobSpec(name="job", script="/job.py", machines=2, ranks_per_machine=1),
        "machines": MACHINES,
        "anomaly": Anomaly(id="m0-1", generation=1, symptom=Symptom.CRASH, headline="seen"),
        "number": 1,
        "generation": 1,
        "resume_step": 0,
        "lineage": [(1, 0)],
        "failures": [Failure(generation=1, step=21, symptom=Symptom.CRASH, cause="SIGKILL")],
    }
    return IncidentState(**(given | fields))


def evidence(step: int = 20, **fields: Any) -> Evidence:
    exits = [RankExit(rank=rank, machine=f"m{rank}", signal=9, completed_steps=21) for rank in range(2)]
    held = [StateCopy(rank=rank, machine=f"m{rank}", completed_steps=step, generation=1) for rank in range(2)]
    return Evidence(**({"generation": 1, "exits": exits, "held": held} | fields))


def said(plan: RestartPlan) -> tuple[Action, str]:
    return plan.action, plan.verdict.rule


def test_a_crash_is_reattempted_where_all_ranks_can_go_on() -> None:
    plan = plan_restart(evidence(), state())
    assert said(plan) == (Action.REATTEMPT, "try-again")
    assert (plan.restore.step, plan.verdict.delay_s, plan.doubt) == (20, 0.0, None)
    assert plan.text.startswith("reattempt from step 20: SIGKILL: assume a transient fault (step 20 is")


def test_the_rule_that_parks_is_named() -> None:
    plan = plan_restart(evidence(unreachable=["m1"]), state())
    assert said(plan) == (Action.PARK, "machine-silent")
    assert plan.verdict.awaited == ("m1",)
    assert plan.text == "park: m1 does not answer: bring its agent back, the job goes on by itself then"


def lost() -> tuple[Evidence, IncidentState]:
    """m1 came back empty, and its disk does not answer."""
    unlisted = [Unlisted(tier=Tier.DISK, machines=["m1"], reason="no answer")]
    found = evidence(emptied=["m1"], searched=True, unlisted=unlisted)
    kept = found.model_copy(update={"held": found.held[:1], "exits": found.exits[:1]})
    return kept, state(spec=state().spec.model_copy(update={"checkpoint": ON_DISK}), emptied={"m1"})


def test_what_may_be_newer_is_asked_for_first_and_then_parks() -> None:
    found, known = lost()
    plan = plan_restart(found, known)
    assert plan.action is Action.SEARCH and plan.doubt is not None and plan.doubt.unlisted
    known.asked = known.spec.policy.storage.tries
    plan = plan_restart(found, known)
    assert said(plan) == (Action.PARK, "newer-may-exist")
    assert plan.doubt is not None


def test_an_operator_who_accepts_the_loss_lets_it_go_on() -> None:
    found, known = lost()
    known.asked = known.spec.policy.storage.tries
    parked = plan_restart(found, known)
    assert parked.doubt is not None
    known.accept(parked.restore, parked.doubt, "ann")
    plan = plan_restart(found, known, by_operator=True)
    assert said(plan) == (Action.REATTEMPT, "resumed") and plan.by_operator


@pytest.mark.parametrize("fields", [{"hold": "closed from outside"}, {"attempts": 99}])
def test_an_operator_overrules_what_judges(fields: dict[str, Any]) -> None:
    assert plan_restart(evidence(), state(**fields)).action is Action.PARK
    plan = plan_restart(evidence(), state(**fields), by_operator=True)
    assert plan.action is Action.REATTEMPT and plan.by_operator
    assert (plan.verdict.text, plan.verdict.delay_s) == ("an operator says so", 0.0)


def test_an_operator_cannot_overrule_what_is_not_possible() -> None:
    silent = plan_restart(evidence(unreachable=["m1"]), state(), by_operator=True)
    assert said(silent) == (Action.PARK, "machine-silent") and not silent.by_operator
    stuck = StateCopy(rank=1, machine="m0", completed_steps=20, tier=Tier.BACKUP, valid=False, reason="no room")
    found = evidence(held=[])
    plan = plan_restart(found, state(unreached=[stuck], bad=[stuck]), by_operator=True)
    assert said(plan) == (Action.PARK, "copies-out-of-reach")


NAN = Anomaly(id="n", generation=1, symptom=Symptom.NOT_FINITE, headline="the loss is NaN since step 18", not_after=18)


def copies(*steps: int, tier: Tier = Tier.OWN) -> list[StateCopy]:
    return [
        StateCopy(rank=rank, machine=f"m{rank}", completed_steps=step, generation=1, tier=tier)
        for step in steps
        for rank in range(2)
    ]


def stopped(*held: StateCopy, **fields: Any) -> Evidence:
    exits = [RankExit(rank=rank, machine=f"m{rank}", stopped_by_us=True, completed_steps=21) for rank in range(2)]
    return evidence(exits=exits, held=list(held), **fields)


def test_a_loss_that_is_not_finite_goes_back_to_before_it_whichever_tier_has_that() -> None:
    known = state(anomaly=NAN)
    plan = plan_restart(stopped(*copies(20, 21), *copies(10, 15, 20, tier=Tier.DISK)), known)

    assert said(plan) == (Action.REATTEMPT, "try-again")
    assert plan.restore.step == 15 and {copy.tier for copy in plan.restore.copies} == {Tier.DISK}
    assert "later ones are not trusted: the loss is NaN since step 18" in plan.text
    assert plan_restart(stopped(*copies(17, 18, 21)), known).restore.step == 18, "the loss of step 18 came from it"


def test_without_a_state_from_before_it_the_job_is_parked_and_an_operator_goes_on_from_the_newest() -> None:
    known = state(anomaly=NAN)
    found = stopped(*copies(20, 21))
    plan = plan_restart(found, known)
    assert said(plan) == (Action.PARK, "fault-in-every-state")
    assert "no checkpoint of step 18 or before is left" in plan.text

    resumed = plan_restart(found, known, by_operator=True)
    assert (resumed.action, resumed.restore.step) == (Action.REATTEMPT, 21)


def test_where_all_that_is_left_is_of_a_version_that_was_taken_back_the_job_is_parked_and_not_begun_anew() -> None:
    known = state(launches=[(2, 20)], trusted=18)
    found = stopped(*copies(20, 21))
    plan = plan_restart(found, known)
    assert said(plan) == (Action.PARK, "state-unreadable")
    assert "no checkpoint of step 18 or before is left" in plan.text

    older = plan_restart(stopped(*copies(20, 21), *copies(15, tier=Tier.DISK)), known)
    assert (older.action, older.restore.step, older.doubt) == (Action.REATTEMPT, 15, None)


def test_a_generation_that_is_bad_from_its_first_step_goes_back_further_than_where_it_began() -> None:
    again = NAN.model_copy(update={"generation": 2})
    known = state(anomaly=again, generation=2, resume_step=18, lineage=[(1, 0), (2, 18)])
    plan = plan_restart(stopped(*copies(18, 19), *copies(15, tier=Tier.DISK), generation=2), known)
    assert plan.restore.step == 15


def test_what_is_saved_after_the_restore_is_trusted() -> None:
    known = state(anomaly=NAN)
    known.launch(plan_restart(stopped(*copies(15, 21)), known).restore)
    assert (known.resume_step, known.not_after) == (15, None)

    newer = [copy.model_copy(update={"generation": 2}) for copy in copies(30)]
    assert known.choose(stopped(*copies(15), *newer, generation=2)).step == 30


def test_a_step_before_it_is_looked_for_where_nobody_looked_yet() -> None:
    remote = CheckpointPolicy(disk=True, disk_path="/disk", disk_every_steps=5, remote_url="file:///r")
    known = state(anomaly=NAN, spec=state().spec.model_copy(update={"checkpoint": remote}))
    plan = plan_restart(stopped(*copies(20, 21)), known)

    assert plan.action is Action.SEARCH and plan.doubt is not None and plan.doubt.newest == 18

    searched = stopped(*copies(20, 21), *copies(15, tier=Tier.REMOTE), searched=True)
    assert plan_restart(searched, known).restore.step == 15


def test_the_same_step_counts_as_the_same_fault() -> None:
    failure = state(anomaly=NAN).failure(stopped(*copies(21)), now_ns=1, first=True)
    assert (failure.step, failure.symptom, failure.cause) == (18, Symptom.NOT_FINITE, "not finite")


def test_a_script_that_restores_by_itself_is_tried_again() -> None:
    """What its own checkpoint holds nobody knows."""
    known = state(anomaly=NAN, resume_step=-1, lineage=[(1, -1)])
    assert said(plan_restart(stopped(), known)) == (Action.REATTEMPT, "try-again")


# The ladder.


def climbing(**fields: Any) -> IncidentState:
    """A job that failed at the same step once more after a restart."""
    known = state(**fields)
    known.ladder.take(Rung.REATTEMPT, known.failures[-1], "first")
    return known


def test_a_job_that_fails_again_has_its_machines_tested() -> None:
    plan = plan_restart(evidence(), climbing())
    assert said(plan) == (Action.DIAGNOSE, "look-at-machines")
    assert plan.text == "diagnose: nothing says for sure what failed; reattempt did not help"
    by_operator = plan_restart(evidence(), climbing(), by_operator=True)
    assert by_operator.action is Action.REATTEMPT, "who resumes it has the last word"


def test_nothing_is_tested_while_a_machine_is_silent_or_is_to_leave() -> None:
    assert said(plan_restart(evidence(unreachable=["m1"]), climbing())) == (Action.PARK, "machine-silent")
    waits = climbing(waits="m1 leaves once there is another")
    assert said(plan_restart(evidence(), waits)) == (Action.PARK, "eviction-waits")


def test_a_rung_keeps_its_turn_whatever_the_limits_say() -> None:
    known = climbing(history=[state().failures[0]] * 5, attempts=9)
    assert plan_restart(evidence(), known).action is Action.DIAGNOSE
    known.ladder.take(Rung.DIAGNOSE, known.failures[-1], "second", found="all passed")
    assert said(plan_restart(evidence(), known)) == (Action.PARK, "same-step-again")


def looked_at(**fields: Any) -> IncidentState:
    """Tests and restarts did not help; the script was seen to step."""
    known = climbing(showing=Showing(kind="steps"), **fields)
    for rung in (Rung.DIAGNOSE, Rung.REATTEMPT):
        known.ladder.take(rung, known.failures[-1], "then")
    return known


def test_a_job_that_nothing_helped_is_replayed() -> None:
    plan = plan_restart(evidence(), looked_at())
    assert said(plan) == (Action.REPLAY, "look-at-machines") and plan.text.startswith(
        "replay: nothing says for sure what failed"
    )
    unseen = looked_at()
    unseen.showing = Showing(kind="calls")
    plan = plan_restart(evidence(), unseen)
    assert plan.action is not Action.REPLAY and plan.rung is not None and "run.steps" in plan.rung.text


def test_the_launch_without_the_machine_that_was_found_is_not_counted() -> None:
    """By then the job has failed as often as the limits allow; they hold again for the next one."""
    limits = {"history": [state().failures[0]] * 5, "attempts": 9}
    known = looked_at(**limits)
    known.ladder.take(Rung.REPLAY, known.failures[-1], "last", found="m1")
    assert said(plan_restart(evidence(), known)) == (Action.PARK, "same-step-again")

    fault = Finding(inspection="replay", reason="failed-replay")
    known.ladder.tested = [MachineFinding(machine=known.machines[-1].name, finding=fault)]
    assert said(plan_restart(evidence(), known))[0] is Action.PARK, "it is still there"
    known.replaced([*known.machines[:-1], Machine(name="m9", address="127.0.0.1:9")], {})
    assert said(plan_restart(evidence(), known)) == (Action.REATTEMPT, "try-again")

    known.launch(plan_restart(evidence(), known).restore)
    assert not known.found_out


@pytest.mark.parametrize("why", ["nothing else", "an update waits", "a machine was found"])
def test_a_restore_that_fails_again_and_again_parks_whatever_comes_with_it(why: str) -> None:
    known = state(failed_restores=2)
    if why == "an update waits":
        code = CodeVersion(script="/job.py", code="c2")
        waits = JobVersion(number=2, runs=code, status=VersionStatus.PENDING, asked_ns=1)
        known.book = VersionBook.of([JobVersion(number=1, status=VersionStatus.RUNNING), waits], 1)
    elif why == "a machine was found":
        fault = Finding(inspection="bitwise", reason="other-bits")
        known.ladder.tested = [MachineFinding(machine="m9", finding=fault)]
        known.joined = {"m1"}
    assert plan_restart(evidence(), known).action is Action.REATTEMPT
    known.failed_restores = 3
    plan = plan_restart(evidence(), known)
    assert said(plan) == (Action.PARK, "restore-fails")
    assert plan.verdict.text == "3 restores failed, one after the other"
    known.launch(plan.restore)
    assert known.failed_restores == 0
    known.failed_restores = 3
    known.begin_again()
    assert known.failed_restores == 0


def test_a_rung_to_be_approved_parks_the_job_until_somebody_does() -> None:
    asks = climbing(
        spec=state().spec.model_copy(
            update={"policy": RecoveryPolicy(ladder={"modes": {Rung.DIAGNOSE: RungMode.APPROVE}})}
        )
    )
    plan = plan_restart(evidence(), asks)
    assert said(plan) == (Action.PARK, "ladder-asks")
    assert "the next rung of the ladder, diagnose" in plan.verdict.text
    asks.ladder.approved.add(Rung.DIAGNOSE)
    assert plan_restart(evidence(), asks).action is Action.DIAGNOSE


def test_what_passed_is_told_with_the_next_restart() -> None:
    known = climbing()
    known.ladder.take(Rung.DIAGNOSE, known.failures[-1], "second", found="all passed")
    plan = plan_restart(evidence(), known)
    assert plan.action is Action.REATTEMPT
    assert plan.verdict.text == "SIGKILL: nothing says for sure what failed; reattempt and diagnose did not help"
    known.joined.add("m7")
    again = plan_restart(evidence(), known)
    assert again.verdict.text == "SIGKILL: what was at fault has left the job"


def pcie_error(*, sure: bool) -> tuple[IncidentState, Evidence]:
    """m1's kernel told of a PCIe error a second before its rank died, for the second time."""
    error = Finding(inspection="kernel-log", reason="pcie-error", sure=sure, since_ns=5 * 10**9, text="not corrected")
    died = RankExit(rank=1, machine="m1", signal=11, time_ns=6 * 10**9, completed_steps=21)
    ended = RankExit(rank=0, machine="m0", signal=9, stopped_by_us=True, completed_steps=21)
    known_now = state(failures=[])
    found = evidence(exits=[died, ended], findings=[MachineFinding(machine="m1", finding=error)])
    found = known_now.merge_evidence(found)
    assert known_now.headline(found).startswith("m1: not corrected")
    failure = known_now.failure(found, now_ns=7 * 10**9, first=True)
    known_now.failed(failure)
    known_now.ladder.take(Rung.REATTEMPT, failure, "first", path="unclear")
    return known_now, found


@pytest.mark.parametrize(
    ("sure", "action", "path"),
    [(False, Action.DIAGNOSE, "unclear"), (True, Action.REATTEMPT, "explained")],
)
def test_a_machine_that_an_inspection_does_not_name_for_sure_is_tested_at_the_second_crash(
    sure: bool, action: Action, path: str
) -> None:
    known, found = pcie_error(sure=sure)
    plan = plan_restart(found, known)
    assert plan.rung is not None and (plan.action, plan.rung.path) == (action, path)
    assert known.is_explained, "it is not held against the code"
    known.launch(plan.restore)
    assert known.failures[-1].explained is (action is not Action.DIAGNOSE)


ERROR = Failure(generation=2, step=21, symptom=Symptom.USER_ERROR, cause="RuntimeError", time_ns=100)
"""Of a version that was taken back; and what ranks raise whose peer is gone, until that is known."""


@pytest.mark.parametrize(
    ("known", "seen", "cleared"),
    [
        pytest.param({}, {}, True, id="the same again"),
        pytest.param({}, {"unreachable": ["m1"]}, False, id="a machine is silent"),
        pytest.param({"joined": {"m2"}}, {}, False, id="a machine left"),
        pytest.param({"explained": True}, {}, False, id="an inspection explains it"),
    ],
)
def test_code_is_cleared_by_a_failure_that_code_can_cause_and_no_machine(
    known: dict[str, Any], seen: dict[str, Any], cleared: bool
) -> None:
    left = JobVersion(number=2, status=VersionStatus.SUSPECT, ended="rolled back to v1: it failed")
    book = VersionBook.of([JobVersion(number=1, status=VersionStatus.RUNNING), left], 1)
    tried = Climbed()
    tried.take(Rung.ROLLBACK, ERROR, "why")
    plan_restart(evidence(**seen), state(failures=[ERROR], book=book, ladder=tried, **known))
    assert book.versions[2].status is (VersionStatus.REPLACED if cleared else VersionStatus.SUSPECT)
