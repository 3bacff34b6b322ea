"""Plans the restart of a stopped job: one decision from the state of its incident and the evidence of the stop.

The ladder (``everstep/decisions/act/ladder``) chooses the next attempt: tests of the machines, a restart without a
change, a rollback of the code, or a replay. The restart rules (``everstep/decisions/act/recover/rules.py``) then decide
whether that attempt is made, whether newer copies are searched for first, or whether the job is parked.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from everstep.decisions.act.ladder.next_rung import NextRung, next_rung, within_window
from everstep.decisions.act.ladder.paths import LadderFacts
from everstep.decisions.act.ladder.worth import BY_CHANCE, chance_of, trains_well
from everstep.decisions.act.progress import position_of
from everstep.decisions.act.recover.doubt import Doubt, DoubtFacts, doubt_of
from everstep.decisions.act.recover.incident_state import IncidentState
from everstep.decisions.act.recover.rules import (
    Action,
    RestartFacts,
    Verdict,
    decide,
    is_unreadable,
    is_unsound,
    look_at_machines,
)
from everstep.decisions.act.versions.next_version import VersionChange, next_version
from everstep.decisions.act.versions.rollback import is_recent, rollback, target_of
from everstep.decisions.blame.diagnose.choose_tests import Choice, choose_tests
from everstep.decisions.blame.replay.group_jobs import no_replay
from everstep.decisions.blame.service import failed_service, is_everywhere
from everstep.decisions.keep.choose_restore import Restore
from everstep.model.evidence import Evidence
from everstep.model.incident import Failure
from everstep.model.ladder import Rung
from everstep.model.recovery_policy import RecoveryPolicy
from everstep.model.version import JobVersion


@dataclass(frozen=True, slots=True)
class RestartPlan:
    """A decision about a stopped job: the action, the reason for it, and the facts that it needs."""

    verdict: Verdict
    restore: Restore
    """The step from which the job resumes, with its copies."""
    evidence: Evidence = field(repr=False)
    """The evidence for the decision."""
    doubt: Doubt | None = None
    """The doubt that is the reason for a search or for parking the job; None: there is no such doubt."""
    by_operator: bool = False
    """The job is launched because an operator resumed it."""
    change: VersionChange | None = None
    """The other version of the code that is launched with the restart; None: the version does not change."""
    rung: NextRung | None = None
    """The rung that the ladder chose; None: the ladder was not asked."""

    @property
    def action(self) -> Action:
        """The action of the decision."""
        return self.verdict.action

    @property
    def text(self) -> str:
        """The decision as text for people."""
        verdict = self.verdict
        if verdict.action in {Action.PARK, Action.DIAGNOSE, Action.REPLAY}:
            return f"{verdict.action}: {verdict.text}"
        wait = f", after {verdict.delay_s:.0f} s" if verdict.delay_s else ""
        return f"{verdict.action} {self.restore.origin}{wait}: {verdict.text} ({self.restore.reason})"


def plan_restart(evidence: Evidence, state: IncidentState, *, by_operator: bool = False) -> RestartPlan:
    """Decide about a stopped job.

    Args:
        evidence: The evidence of the stop.
        state: The state of the incident, including the current failure.
        by_operator: An operator has just resumed the job.
    """
    state.limit_to_readable(evidence)
    restore = state.choose(evidence)
    is_silent = bool(evidence.unreachable or evidence.problem)
    service = failed_service(
        state.failures[-1].classification, everywhere=is_everywhere(evidence, state.spec.topology().world_size)
    )
    # The ladder is not asked if the rules park or resume the job whichever rung is next.
    rung = None if by_operator or is_silent or state.waits or state.hold else climb(state, service)
    facts = RestartFacts(
        failure=state.failures[-1],
        history=tuple(state.history),
        attempts=state.attempts,
        evidence=evidence,
        restore_step=restore.step,
        world_size=state.spec.topology().world_size,
        resume_step=state.resume_step,
        restore_reason=restore.reason,
        unreached=tuple(state.unreached),
        asked=state.asked,
        accepted=state.accepts(restore),
        needs_operator=state.hold,
        waits=state.waits,
        rung=rung,
        failed_restores=state.failed_restores,
        readable_until=state.trusted,
        sound_until=state.not_after,
        fault=state.anomaly.headline,
        failed_machine_left=state.failed_machine_left,
        replaced=bool(state.joined),
        by_operator=by_operator,
        service="" if state.is_explained else service,
        trains_well=_trains_well(state),
    )
    if not look_at_machines(facts, state.spec.policy):
        change = next_version(
            state.book,
            state.failures[-1],
            state.spec.policy,
            explained=state.is_explained,
            by_operator=by_operator,
            rolls_back=_why_back(rung, state.failures[-1]),
        )
        facts = replace(facts, doubt=None if is_silent else _doubt(state, evidence, restore), change=change)
    verdict = decide(facts, state.spec.policy)
    return RestartPlan(
        verdict,
        restore,
        evidence,
        doubt=facts.doubt if verdict.action is Action.SEARCH or facts.is_in_vain(state.spec.policy) else None,
        by_operator=by_operator and verdict.action is Action.REATTEMPT,
        change=facts.change if verdict.action is Action.REATTEMPT else None,
        rung=rung,
    )


def _doubt(state: IncidentState, evidence: Evidence, restore: Restore) -> Doubt | None:
    """Return the doubt about a restart; None: the step is certain."""
    facts = DoubtFacts(
        held=state.usable(evidence),
        unreached=state.unreached,
        evidence=evidence,
        assignment=state.assignment,
        resume_step=state.resume_step,
        policy=state.spec.checkpoint,
        not_after=min((step for step in (state.not_after, state.trusted) if step is not None), default=None),
    )
    unusable = is_unreadable(restore.step, state.trusted) or is_unsound(restore.step, state.not_after)
    return doubt_of(0 if unusable else restore.step, facts)


def _why_back(rung: NextRung | None, failure: Failure) -> str | None:
    """Return why the ladder rolls the code back; empty: it does not roll back; None: the ladder was not asked."""
    if rung is None or rung.rung is not Rung.ROLLBACK:
        return None if rung is None else ""
    return f"{rung.why}: {failure.cause} {position_of(failure)}".strip()


def climb(state: IncidentState, service: str = "") -> NextRung:
    """Return the rung that the ladder chooses for the current failure; ``service`` is the service that failed."""
    failure, policy, book = state.failures[-1], state.spec.policy, state.book
    attempts = [*state.ladder.remembered, *state.ladder.all_tried]
    # After the loss of a machine the other ranks may raise any error, so such an error clears no rolled-back version.
    if not state.is_handled:
        state.ladder.clear_code(failure, book, state.unsolved)
    versions = list(book.versions.values())
    running = book.versions.get(book.running)
    blamed = rollback(versions, book.running, failure, explained=state.is_explained, policy=policy)
    target = target_of(versions, book.running) if running is not None else None
    facts = LadderFacts(
        failure=failure,
        explained=state.is_handled,
        hinted=state.hinted,
        tried=tuple(state.ladder.tried),
        remembered=tuple(state.ladder.remembered),
        of_script=state.ladder.of_script,
        blamed=blamed is not None,
        recent=running is not None and is_recent(running, failure.time_ns, policy.rollback.error_within_h * 3600.0),
        version=f"v{running.number}" if running else "",
        ran_well_h=_ran_well_h(running, failure, policy) if running else None,
        back_to=target.name if target else "",
        tests=tests_of(state).tests,
        unsolved=state.unsolved,
        no_replay=no_replay(state.spec, state.showing),
        diagnose_at_once=policy.diagnose.at_once,
        service=service,
        gain_s=_gain_s(state),
        chance=_chance(state),
        restart_s=state.first_step_s,
        measured_s={tried.rung: tried.seconds for tried in attempts if tried.seconds},
        approved=frozenset(state.ladder.approved),
    )
    return next_rung(facts, policy)


def _trains_well(state: IncidentState) -> bool:
    """Return whether the job trains well in spite of its failures, and the failures have no place in common."""
    return _chance(state) > BY_CHANCE and trains_well(_gain_s(state), state.first_step_s)


def _chance(state: IncidentState) -> float:
    """Return the probability that the failure is at the same place as earlier failures only by chance."""
    failure = state.failures[-1]
    attempts = within_window(state.ladder.remembered, failure, state.spec.policy)
    places = {tried.generation: (tried.machine, tried.step) for tried in attempts if tried.symptom == failure.symptom}
    places |= {earlier.generation: (earlier.machine, earlier.step) for earlier in state.history}
    return chance_of(list(places.values()), failure.machine, failure.step, len(state.machines))


def _gain_s(state: IncidentState) -> float | None:
    """Return how long the job trained since its last failure, seconds; None: it did not fail before."""
    ends_ns = [earlier.over_ns or earlier.time_ns for earlier in state.history]
    ends_ns += [tried.time_ns + round(tried.seconds * 1e9) for tried in state.ladder.remembered]
    return (state.failures[-1].time_ns - max(ends_ns)) / 1e9 if ends_ns else None


def tests_of(state: IncidentState) -> Choice:
    """Return the diagnostic tests for the current failure."""
    failure, policy = state.failures[-1], state.spec.policy
    ended = failure.classification
    fault, owner = (ended.fault, ended.owner) if ended is not None else ("", "")
    is_cause = ended is not None and not ended.consequence
    return choose_tests(failure.symptom, fault, owner if is_cause else "", off=policy.diagnose.off)


def _ran_well_h(running: JobVersion, failure: Failure, policy: RecoveryPolicy) -> float | None:
    """Return how many hours the running version ran without a fault; None: not long enough to clear the version."""
    hours = (failure.time_ns - running.began_ns) / 3600e9
    return hours if running.steady and hours >= policy.rollback.error_within_h else None
