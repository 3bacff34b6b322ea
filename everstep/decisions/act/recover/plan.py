"""What is done about a stopped job: one pure decision, from what is known to a plan.

What is tried in which order says the ladder (``everstep/decisions/act/ladder``): tests
of the machines, a restart as it is, the code taken back. How often a job is
restarted is not stated by ByteRobust: the limits are ours, in
:class:`~everstep.model.recovery_policy.RecoveryPolicy`. The rules that park a job
instead are in ``everstep/decisions/act/recover/rules.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from everstep.decisions.act.ladder.next import LadderStep
from everstep.decisions.act.ladder.paths import EXPLAINED
from everstep.decisions.act.recover.climb import climb
from everstep.decisions.act.recover.doubt import Doubt, next_look
from everstep.decisions.act.recover.rules import COUNTED, Action, RestartFacts, Verdict, judge, place_of
from everstep.decisions.act.recover.state import RecoveryState
from everstep.decisions.act.versions.next import VersionChange, next_version
from everstep.decisions.keep.choose_restore import Restore
from everstep.model.evidence import Evidence
from everstep.model.ladder import Rung

COUNTED_NAMES = frozenset(rule.__name__ for rule in COUNTED)
BEFORE_A_RESTART = {Rung.DIAGNOSE: Action.DIAGNOSE, Rung.REPLAY: Action.REPLAY}
"""Rungs that look at the machines while the job is stopped; then it is decided again."""


@dataclass(frozen=True, slots=True)
class RestartPlan:
    """One decision: what to do, why, and with what."""

    verdict: Verdict
    restore: Restore
    """Where the job goes on, with which copies."""
    evidence: Evidence = field(repr=False)
    """What it rests on."""
    doubt: Doubt | None = None
    """What may be newer than where it goes on: to be asked for, or was asked for in vain; None: nothing."""
    by_operator: bool = False
    """An operator's resume has decided it."""
    change: VersionChange | None = None
    """Another version of the code that comes with the restart; None: none does."""
    step: LadderStep | None = None
    """What the ladder said; None: it was not asked."""

    @property
    def action(self) -> Action:
        """What to do."""
        return self.verdict.action

    @property
    def text(self) -> str:
        """For people."""
        verdict = self.verdict
        if verdict.action in {Action.PARK, Action.DIAGNOSE, Action.REPLAY}:
            return f"{verdict.action}: {verdict.reason}"
        wait = f", after {verdict.delay_s:.0f} s" if verdict.delay_s else ""
        return f"{verdict.action} {self.restore.origin}{wait}: {verdict.reason} ({self.restore.reason})"


def plan_restart(evidence: Evidence, state: RecoveryState, *, by_operator: bool = False) -> RestartPlan:
    """What to do about a stopped job.

    Args:
        evidence: What the machines know since the stop.
        state: Of the incident, the failure at hand included.
        by_operator: An operator has just resumed the job.
    """
    state.distrust_what_does_not_fit(evidence)
    policy, restore = state.spec.policy, state.choose(evidence)
    # The rules park the job anyway: for a silent machine, for who is to leave it, or for an operator.
    stuck = evidence.unreachable or evidence.problem or state.waits or state.hold
    step = None if by_operator or stuck else climb(state)
    if step is not None and step.rung in BEFORE_A_RESTART and not step.asks:
        return RestartPlan(Verdict(BEFORE_A_RESTART[step.rung], step.text), restore, evidence, step=step)
    # The rules park the job for a silent machine anyway.
    doubt = None if evidence.unreachable or evidence.problem else state.doubt(evidence, restore)
    look = next_look(restore.step, doubt, state.asked, policy, accepted=state.accepts(restore))
    if look.action == "ask":
        ask = Verdict(Action.ASK, look.reason, delay_s=look.delay_s)
        return RestartPlan(ask, restore, evidence, doubt)
    in_vain = look.action == "park"
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
        doubt=look.reason if in_vain else "",
        hold=state.hold,
        waits=state.waits,
        asks=asked_of(step) if step is not None and step.asks else "",
        unsolved=_unsolved(step, state) if step is not None and step.last else "",
        failed_restores=state.failed_restores,
        distrusted=state.distrusts(restore),
    )
    change = next_version(
        state.book,
        state.failures[-1],
        policy,
        explained=state.is_explained,
        by_operator=by_operator,
        rolls_back=_rolls_back(step, state) if step is not None else None,
    )
    other_code, why = change.why if change else "", _why_again(step, state)
    verdict = judge(facts, policy, by_operator=by_operator, other_code=other_code, found_out=state.found_out, why=why)
    decided = by_operator and verdict.action is Action.REATTEMPT
    if verdict.action is Action.PARK:
        change = None
        if step is not None and step.tried and verdict.rule in COUNTED_NAMES:
            verdict = replace(verdict, reason=f"{verdict.reason}; {step.text}")
    return RestartPlan(verdict, restore, evidence, doubt if in_vain else None, decided, change, step)


def asked_of(step: LadderStep) -> str:
    """What an operator is asked, where a rung needs an approval."""
    return (
        f"an operator has to approve the next rung of the ladder, {step.rung} ('everstep approve'); "
        f"'everstep resume' goes on without: {step.text}"
    )


def _rolls_back(step: LadderStep, state: RecoveryState) -> str:
    if step.rung is not Rung.ROLLBACK:
        return ""
    failure = state.failures[-1]
    return f"{step.why}: {failure.cause} {place_of(failure)}".strip()


def _unsolved(step: LadderStep, state: RecoveryState) -> str:
    """Why a fault that no rung solved is not restarted once more; empty: it is."""
    policy = state.spec.policy
    if not 0 < policy.ladder.restarts <= step.restarts:
        return ""
    return f"it came again after {step.restarts} restarts that followed the last rung of the ladder"


def _why_again(step: LadderStep | None, state: RecoveryState) -> str:
    """Why a job is tried once more as it is; empty: there is nothing to add."""
    if step is None:
        return ""
    if step.path == EXPLAINED:
        return "what was at fault has left the job" if state.joined else ""
    return step.text if step.tried else ""
