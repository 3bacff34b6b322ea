"""What is done about a stopped job: one pure decision, from what is known to a plan.

ByteRobust assumes a transient fault when nothing points at a machine and
restarts the job as it is (section 4.1, "reattempt"). How often is not stated:
the limits are ours, in :class:`~everstep.model.recovery_policy.RecoveryPolicy`.
The rules that park a job instead are in ``everstep/decisions/recover/rules.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from everstep.decisions.checkpoints.choose_restore import Restore
from everstep.decisions.recover.doubt import Doubt, next_look
from everstep.decisions.recover.rules import Action, RestartFacts, Verdict, judge
from everstep.decisions.recover.state import RecoveryState
from everstep.decisions.versions.next import VersionChange, next_version
from everstep.model.incident import Evidence


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

    @property
    def action(self) -> Action:
        """What to do."""
        return self.verdict.action

    @property
    def text(self) -> str:
        """For people."""
        verdict = self.verdict
        if verdict.action is Action.PARK:
            return f"park: {verdict.reason}"
        wait = f", after {verdict.delay_s:.0f} s" if verdict.delay_s else ""
        return f"{verdict.action} {self.restore.origin}{wait}: {verdict.reason} ({self.restore.reason})"


def plan_restart(
    evidence: Evidence, state: RecoveryState, *, by_operator: bool = False, certain: bool = False
) -> RestartPlan:
    """What to do about a stopped job.

    Args:
        evidence: What the machines know since the stop.
        state: Of the incident, the failure at hand included.
        by_operator: An operator has just resumed the job.
        certain: Nothing newer is looked for, as by incidents that began before there was a doubt.
    """
    state.distrust_what_does_not_fit(evidence)
    policy, restore = state.spec.policy, state.choose(evidence)
    # The rules park the job for a silent machine anyway.
    look_for_newer = not (certain or evidence.unreachable or evidence.problem)
    doubt = state.doubt(evidence, restore) if look_for_newer else None
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
        distrusted=state.distrusts(restore),
    )
    change = next_version(state.book, state.failures[-1], policy, explained=state.is_explained, by_operator=by_operator)
    verdict = judge(facts, policy, by_operator=by_operator, other_code=change.why if change else "")
    decided = by_operator and verdict.action is Action.REATTEMPT
    if verdict.action is Action.PARK:
        change = None
    return RestartPlan(verdict, restore, evidence, doubt if in_vain else None, decided, change)
