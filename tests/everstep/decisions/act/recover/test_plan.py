"""The plan for the restart of a stopped job."""

from __future__ import annotations

from typing import Any

import pytest

from everstep.decisions.act.recover.incident_state import IncidentState
from everstep.decisions.act.recover.plan import RestartPlan, plan_restart
from everstep.decisions.act.recover.rules import Action
from everstep.decisions.act.recover.tried_rungs import TriedRungs
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
from everstep.model.state_copy import StateCopies, Tier
from everstep.model.version import CodeVersion, JobVersion, VersionStatus

MACHINES = [Machine(name=f"m{index}", address=f"127.0.0.1{index}:1") for index in range(2)]
ON_DISK = CheckpointPolicy(disk=True, disk_path="/disk", disk_every_steps=5)


def state(**fields: Any) -> IncidentState:
    usual: dict[str, Any] = {
        "spec": JobSpec(name="job", script="/job.py", machines=2, ranks_per_machine=1),
        "machines": MACHINES,
        "anomaly": Anomaly(id="m0-1", generation=1, symptom=Symptom.CRASH, headline="seen"),
        "number": 1,
        "generation": 1,
        "resume_step": 0,
        "lineage": [(1, 0)],
        "failures": [Failure(generation=1, step=21, symptom=Symptom.CRASH, cause="SIGKILL")],
    }
    return IncidentState(**(usual | fields))


def evidence(step: int = 20, **fields: Any) -> Evidence:
    exits = [RankExit(rank=rank, machine=f"m{rank}", signal=9, completed_steps=21) for rank in range(2)]
    held = [StateCopies.one(rank=rank, machine=f"m{rank}", completed_steps=step, generation=1) for rank in range(2)]
    return Evidence(**({"generation": 1, "exits": exits, "held": held} | fields))


def decided(plan: RestartPlan) -> tuple[Action, str]:
    """Return the action of a plan, and the rule that decided it."""
    return plan.action, plan.verdict.rule


def test_a_crash_is_reattempted_if_all_ranks_can_resume() -> None:
    plan = plan_restart(evidence(), state())
    assert decided(plan) == (Action.REATTEMPT, "try-again")
    assert (plan.restore.step, plan.verdict.delay_s, plan.doubt) == (20, 0.0, None)
    assert plan.text.startswith("reattempt from step 20: SIGKILL: assume a transient fault (step 20 is")


def test_a_silent_machine_parks_the_job() -> None:
    plan = plan_restart(evidence(unreachable=["m1"]), state())
    assert decided(plan) == (Action.PARK, "machine-silent")
    assert plan.verdict.awaited == ("m1",)
    assert plan.text.startswith("park: no answer of m1")


def lost() -> tuple[Evidence, IncidentState]:
    """The evidence and the state after m1 lost its memory. The disk of m1 does not answer."""
    unlisted = [Unlisted(tier=Tier.DISK, machines=["m1"], reason="no answer")]
    found = evidence(emptied=["m1"], searched=True, unlisted=unlisted)
    kept = found.model_copy(update={"held": found.held[:1], "exits": found.exits[:1]})
    return kept, state(spec=state().spec.model_copy(update={"checkpoint": ON_DISK}), emptied={"m1"})


def test_newer_steps_are_searched_for_before_the_job_is_parked() -> None:
    found, known = lost()
    plan = plan_restart(found, known)
    assert plan.action is Action.SEARCH and plan.doubt is not None and plan.doubt.unlisted
    known.asked = known.spec.policy.storage.tries
    plan = plan_restart(found, known)
    assert decided(plan) == (Action.PARK, "newer-may-exist")
    assert plan.doubt is not None


def test_the_job_resumes_for_an_operator_who_accepts_the_loss() -> None:
    found, known = lost()
    known.asked = known.spec.policy.storage.tries
    parked = plan_restart(found, known)
    assert parked.doubt is not None
    known.accept(parked.restore, parked.doubt, "ann")
    plan = plan_restart(found, known, by_operator=True)
    assert decided(plan) == (Action.REATTEMPT, "resumed") and plan.by_operator


@pytest.mark.parametrize("fields", [{"hold": "closed from outside"}, {"attempts": 99}])
def test_an_operator_overrules_most_rules(fields: dict[str, Any]) -> None:
    assert plan_restart(evidence(), state(**fields)).action is Action.PARK
    plan = plan_restart(evidence(), state(**fields), by_operator=True)
    assert plan.action is Action.REATTEMPT and plan.by_operator
    assert (plan.verdict.rule, plan.verdict.delay_s) == ("resumed", 0.0)


def test_an_operator_does_not_overrule_rules_about_impossible_restarts() -> None:
    silent = plan_restart(evidence(unreachable=["m1"]), state(), by_operator=True)
    assert decided(silent) == (Action.PARK, "machine-silent") and not silent.by_operator
    stuck = StateCopies.one(rank=1, machine="m0", completed_steps=20, tier=Tier.BACKUP, valid=False, reason="no room")
    found = evidence(held=[])
    plan = plan_restart(found, state(unreached=[stuck], bad=[stuck]), by_operator=True)
    assert decided(plan) == (Action.PARK, "copies-out-of-reach")


NAN = Anomaly(id="n", generation=1, symptom=Symptom.NOT_FINITE, headline="the loss is NaN since step 18", not_after=18)


def copies(*steps: int, tier: Tier = Tier.OWN) -> list[StateCopies]:
    return [
        StateCopies.one(rank=rank, machine=f"m{rank}", completed_steps=step, generation=1, tier=tier)
        for step in steps
        for rank in range(2)
    ]


def stopped(*held: StateCopies, **fields: Any) -> Evidence:
    exits = [RankExit(rank=rank, machine=f"m{rank}", stopped_by_us=True, completed_steps=21) for rank in range(2)]
    return evidence(exits=exits, held=list(held), **fields)


def test_after_a_nan_the_job_resumes_from_before_it_from_any_tier() -> None:
    known = state(anomaly=NAN)
    plan = plan_restart(stopped(*copies(20, 21), *copies(10, 15, 20, tier=Tier.DISK)), known)

    assert decided(plan) == (Action.REATTEMPT, "try-again")
    assert plan.restore.step == 15 and {copy.tier for copy in plan.restore.copies} == {Tier.DISK}
    assert "later steps are not trusted: the loss is NaN since step 18" in plan.text
    assert plan_restart(stopped(*copies(17, 18, 21)), known).restore.step == 18, (
        "step 18 is restored, the newest step without the NaN"
    )


def test_without_a_state_from_before_a_nan_the_job_is_parked_and_resumed_from_the_newest_step() -> None:
    known = state(anomaly=NAN)
    found = stopped(*copies(20, 21))
    assert decided(plan_restart(found, known)) == (Action.PARK, "fault-in-every-state")

    resumed = plan_restart(found, known, by_operator=True)
    assert (resumed.action, resumed.restore.step) == (Action.REATTEMPT, 21)


def test_the_job_is_parked_if_only_steps_of_a_rolled_back_version_are_left() -> None:
    known = state(launches=[(2, 20)], trusted=18)
    found = stopped(*copies(20, 21))
    assert decided(plan_restart(found, known)) == (Action.PARK, "state-unreadable")

    older = plan_restart(stopped(*copies(20, 21), *copies(15, tier=Tier.DISK)), known)
    assert (older.action, older.restore.step, older.doubt) == (Action.REATTEMPT, 15, None)


def test_a_generation_with_a_nan_in_its_first_step_resumes_from_before_its_begin() -> None:
    again = NAN.model_copy(update={"generation": 2})
    known = state(anomaly=again, generation=2, resume_step=18, lineage=[(1, 0), (2, 18)])
    plan = plan_restart(stopped(*copies(18, 19), *copies(15, tier=Tier.DISK), generation=2), known)
    assert plan.restore.step == 15


def test_steps_of_the_generation_after_a_nan_are_trusted() -> None:
    known = state(anomaly=NAN)
    known.record_launch(plan_restart(stopped(*copies(15, 21)), known).restore)
    assert (known.resume_step, known.not_after) == (15, None)

    newer = [copy.model_copy(update={"generation": 2}) for copy in copies(30)]
    assert known.choose(stopped(*copies(15), *newer, generation=2)).step == 30


def test_a_step_from_before_a_nan_is_searched_for_in_locations_that_were_not_asked() -> None:
    remote = CheckpointPolicy(disk=True, disk_path="/disk", disk_every_steps=5, remote_url="file:///r")
    known = state(anomaly=NAN, spec=state().spec.model_copy(update={"checkpoint": remote}))
    plan = plan_restart(stopped(*copies(20, 21)), known)

    assert plan.action is Action.SEARCH and plan.doubt is not None and plan.doubt.newest == 18

    searched = stopped(*copies(20, 21), *copies(15, tier=Tier.REMOTE), searched=True)
    assert plan_restart(searched, known).restore.step == 15


def test_a_nan_is_a_failure_at_its_first_bad_step() -> None:
    failure = state(anomaly=NAN).read_failure(stopped(*copies(21)), now_ns=1, first=True)
    assert (failure.step, failure.symptom, failure.cause) == (18, Symptom.NOT_FINITE, "not finite")


def test_after_a_nan_a_script_that_restores_by_itself_is_tried_again() -> None:
    """It is unknown whether the script's own checkpoint has the fault."""
    known = state(anomaly=NAN, resume_step=-1, lineage=[(1, -1)])
    assert decided(plan_restart(stopped(), known)) == (Action.REATTEMPT, "try-again")


# The ladder.


def climbing(**fields: Any) -> IncidentState:
    """Return a job that failed once more at the same step after a restart."""
    known = state(**fields)
    known.ladder.add(Rung.REATTEMPT, known.failures[-1], "first")
    return known


def test_a_job_that_fails_again_has_its_machines_tested() -> None:
    plan = plan_restart(evidence(), climbing())
    assert decided(plan) == (Action.DIAGNOSE, "look-at-machines")
    assert plan.text == "diagnose: the cause is not known; reattempt did not help"
    by_operator = plan_restart(evidence(), climbing(), by_operator=True)
    assert by_operator.action is Action.REATTEMPT, "a resume by an operator skips the tests"


def test_no_machine_is_tested_while_one_is_silent_or_is_to_leave() -> None:
    assert decided(plan_restart(evidence(unreachable=["m1"]), climbing())) == (Action.PARK, "machine-silent")
    waits = climbing(waits="m1 leaves once there is another")
    assert decided(plan_restart(evidence(), waits)) == (Action.PARK, "eviction-waits")


def test_limits_do_not_prevent_a_rung_that_tests_the_machines() -> None:
    known = climbing(history=[state().failures[0]] * 5, attempts=9)
    assert plan_restart(evidence(), known).action is Action.DIAGNOSE
    known.ladder.add(Rung.DIAGNOSE, known.failures[-1], "second", found="all passed")
    assert decided(plan_restart(evidence(), known)) == (Action.PARK, "same-step-again")


def after_tests(**fields: Any) -> IncidentState:
    """Return a job whose script shows its steps. Tests and restarts did not help."""
    known = climbing(showing=Showing(kind="steps"), **fields)
    for rung in (Rung.DIAGNOSE, Rung.REATTEMPT):
        known.ladder.add(rung, known.failures[-1], "then")
    return known


def test_a_job_is_replayed_after_tests_and_restarts_did_not_help() -> None:
    assert decided(plan_restart(evidence(), after_tests())) == (Action.REPLAY, "look-at-machines")
    without_loop = after_tests()
    without_loop.showing = Showing(kind="calls")
    plan = plan_restart(evidence(), without_loop)
    assert plan.action is not Action.REPLAY and plan.rung is not None and "run.steps" in plan.rung.text


def test_limits_do_not_prevent_the_first_launch_after_a_failed_machine_left() -> None:
    known = after_tests(history=[state().failures[0]] * 5, attempts=9)
    known.ladder.add(Rung.REPLAY, known.failures[-1], "last", found="m1")
    assert decided(plan_restart(evidence(), known)) == (Action.PARK, "same-step-again")

    fault = Finding(inspection="replay", reason="failed-replay")
    known.ladder.tested = [MachineFinding(machine=known.machines[-1].name, finding=fault)]
    assert plan_restart(evidence(), known).action is Action.PARK, "the failed machine is still in the job"
    known.record_replacement([*known.machines[:-1], Machine(name="m9", address="127.0.0.1:9")], {})
    assert decided(plan_restart(evidence(), known)) == (Action.REATTEMPT, "try-again")

    known.record_launch(plan_restart(evidence(), known).restore)
    assert not known.failed_machine_left


@pytest.mark.parametrize("also", ["", "an update is pending", "a failed machine left"])
def test_a_restore_that_fails_too_often_parks_the_job(also: str) -> None:
    known = state(failed_restores=2)
    if also == "an update is pending":
        code = CodeVersion(script="/job.py", code="c2")
        pending = JobVersion(number=2, runs=code, status=VersionStatus.PENDING, asked_ns=1)
        known.book = VersionBook.of([JobVersion(number=1, status=VersionStatus.RUNNING), pending], 1)
    elif also:
        fault = Finding(inspection="bitwise", reason="other-bits")
        known.ladder.tested = [MachineFinding(machine="m9", finding=fault)]
        known.joined = {"m1"}
    assert plan_restart(evidence(), known).action is Action.REATTEMPT
    known.failed_restores = 3
    plan = plan_restart(evidence(), known)
    assert decided(plan) == (Action.PARK, "restore-fails")
    known.record_launch(plan.restore)
    assert known.failed_restores == 0
    known.failed_restores = 3
    known.begin_again()
    assert known.failed_restores == 0


def test_a_rung_that_needs_approval_parks_the_job() -> None:
    asks = climbing(
        spec=state().spec.model_copy(
            update={"policy": RecoveryPolicy(ladder={"modes": {Rung.DIAGNOSE: RungMode.APPROVE}})}
        )
    )
    assert decided(plan_restart(evidence(), asks)) == (Action.PARK, "ladder-asks")
    asks.ladder.approved.add(Rung.DIAGNOSE)
    assert plan_restart(evidence(), asks).action is Action.DIAGNOSE


def test_the_next_restart_names_the_rungs_that_did_not_help() -> None:
    known = climbing()
    known.ladder.add(Rung.DIAGNOSE, known.failures[-1], "second", found="all passed")
    plan = plan_restart(evidence(), known)
    assert plan.action is Action.REATTEMPT
    assert plan.verdict.text == "SIGKILL: the cause is not known; reattempt and diagnose did not help"
    known.joined.add("m7")
    again = plan_restart(evidence(), known)
    assert again.verdict.text == "SIGKILL: the machine at fault has left the job"


def pcie_error(*, sure: bool) -> tuple[IncidentState, Evidence]:
    """Return the second crash of a job. It came a second after the kernel of m1 logged a PCIe error."""
    error = Finding(inspection="kernel-log", reason="pcie-error", sure=sure, since_ns=5 * 10**9, text="not corrected")
    died = RankExit(rank=1, machine="m1", signal=11, time_ns=6 * 10**9, completed_steps=21)
    ended = RankExit(rank=0, machine="m0", signal=9, stopped_by_us=True, completed_steps=21)
    known_now = state(failures=[])
    found = evidence(exits=[died, ended], findings=[MachineFinding(machine="m1", finding=error)])
    found = known_now.merge_evidence(found)
    assert known_now.explain(found).startswith("m1: not corrected")
    failure = known_now.read_failure(found, now_ns=7 * 10**9, first=True)
    known_now.record_failure(failure)
    known_now.ladder.add(Rung.REATTEMPT, failure, "first", path="unclear")
    return known_now, found


@pytest.mark.parametrize(
    ("sure", "action", "path"),
    [(False, Action.DIAGNOSE, "unclear"), (True, Action.REATTEMPT, "explained")],
)
def test_after_a_second_crash_an_unsure_finding_leads_to_tests(sure: bool, action: Action, path: str) -> None:
    known, found = pcie_error(sure=sure)
    plan = plan_restart(found, known)
    assert plan.rung is not None and (plan.action, plan.rung.path) == (action, path)
    assert known.is_explained, "the finding explains the failure, so it does not count against the code"
    known.record_launch(plan.restore)
    assert known.failures[-1].explained is (action is not Action.DIAGNOSE)


ERROR = Failure(generation=2, step=21, symptom=Symptom.EXCEPTION, cause="RuntimeError", time_ns=100)
"""A failure that led to a rollback.

Ranks also raise this error when another rank is lost, as long as the loss is not known.
"""


@pytest.mark.parametrize(
    ("known", "seen", "cleared"),
    [
        pytest.param({}, {}, True, id="the job failed in the same way"),
        pytest.param({}, {"unreachable": ["m1"]}, False, id="a machine is silent"),
        pytest.param({"joined": {"m2"}}, {}, False, id="a machine left"),
        pytest.param({"explained": True}, {}, False, id="a finding explains the failure"),
    ],
)
def test_a_rolled_back_version_is_cleared_unless_a_machine_is_to_blame(
    known: dict[str, Any], seen: dict[str, Any], cleared: bool
) -> None:
    left = JobVersion(number=2, status=VersionStatus.SUSPECT, ended="rolled back to v1: it failed")
    book = VersionBook.of([JobVersion(number=1, status=VersionStatus.RUNNING), left], 1)
    tried = TriedRungs()
    tried.add(Rung.ROLLBACK, ERROR, "why")
    plan_restart(evidence(**seen), state(failures=[ERROR], book=book, ladder=tried, **known))
    assert book.versions[2].status is (VersionStatus.REPLACED if cleared else VersionStatus.SUSPECT)
