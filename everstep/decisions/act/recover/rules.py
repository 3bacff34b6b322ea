"""The rules that park a failed job for an operator instead of trying it again, as one readable list."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from everstep.decisions.blame.first_failure import short_exception
from everstep.model.evidence import Evidence
from everstep.model.incident import GOES_ON, Failure, Symptom
from everstep.model.recovery_policy import RecoveryPolicy
from everstep.model.state_copy import StateCopy


@dataclass(frozen=True, slots=True)
class RestartFacts:
    """What the decision looks at."""

    failure: Failure
    """The failure at hand."""
    history: tuple[Failure, ...]
    """Earlier failures since the last steady progress, oldest first, the one at hand not included."""
    attempts: int
    """Reattempts of this incident so far."""
    evidence: Evidence
    restore_step: int
    """Where a restart would go on; -1: the script restores by itself."""
    world_size: int
    resume_step: int = 0
    """Where the failed generation had begun."""
    restore_reason: str = ""
    """Why the restart would go on there."""
    unreached: tuple[StateCopy, ...] = ()
    """Copies that are there and could not be brought to where they are needed, with reasons."""
    doubt: str = ""
    """Why the job may not go on there: what may be newer, and was asked for in vain; empty: nothing."""
    hold: str = ""
    """Why an operator has to decide how the job goes on, independent of the other facts; empty: no decision needed."""
    waits: str = ""
    """Why machines that are to leave the job are still in it: for whom it waits; empty: there are none."""
    asks: str = ""
    """Which rung of the ladder an operator has to approve, and why it comes; empty: none."""
    unsolved: str = ""
    """What was tried, where that is all that there is, and often enough; empty: something is left to try."""
    failed_restores: int = 0
    """Since the last launch, or since an operator resumed."""
    distrusted: str = ""
    """Why the state from which it would go on has the fault in it; empty: nothing says so."""


class Action(StrEnum):
    """What is done next about a stopped job."""

    ASK = "ask"
    """Ask all places where further copies may lie, and decide again."""
    DIAGNOSE = "diagnose"
    """Test the machines, and decide again."""
    REPLAY = "replay"
    """Replay the job on groups of its machines, and decide again."""
    REATTEMPT = "reattempt"
    PARK = "park"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the rules say, and why."""

    action: Action
    reason: str
    rule: str = ""
    """Name of the rule that parks the job; empty: none does."""
    delay_s: float = 0.0
    silent: tuple[str, ...] = ()
    """Machines without which the job cannot go on: it does, by itself, once they answer."""


UNFIT_EXCEPTION = "CheckpointError"
"""End of the name of what a rank raises when a checkpoint that is whole does not fit the script."""

BEFORE_ANY_STEP = "before any step was shown"
"""Where a process failed of which no step was seen."""

Rule = Callable[[RestartFacts, RecoveryPolicy], str | None]


def operator_must_decide(facts: RestartFacts, policy: RecoveryPolicy) -> str | None:
    """An operator has to say how the job goes on: the fault's last incident was closed from outside."""
    return facts.hold or None


def eviction_waits(facts: RestartFacts, policy: RecoveryPolicy) -> str | None:
    """Machines are to be evicted, and an operator, or a machine in their place, is waited for."""
    return facts.waits or None


def ladder_asks(facts: RestartFacts, policy: RecoveryPolicy) -> str | None:
    """The next rung of the ladder needs an operator's approval."""
    return facts.asks or None


def machine_silent(facts: RestartFacts, policy: RecoveryPolicy) -> str | None:
    """A machine that does not answer cannot take part in a restart at full width."""
    if facts.evidence.problem:
        return f"the machines could not be stopped: {facts.evidence.problem}"
    silent = facts.evidence.unreachable
    return (
        f"{', '.join(silent)} does not answer: bring its agent back, the job goes on by itself then" if silent else None
    )


def broken_from_the_start(facts: RestartFacts, policy: RecoveryPolicy) -> str | None:
    """Every rank raised the same exception before its first step: trying again cannot help.

    A state that does not fit is the same on all ranks in other words: each names tensors of its own.
    """
    raised = [end.exception for end in facts.evidence.exits if end.exception and not end.stopped_by_us]
    ranks = {end.rank for end in facts.evidence.exits if end.exception and not end.stopped_by_us}
    same = len(set(raised)) == 1 or all(exception.split(":")[0].endswith(UNFIT_EXCEPTION) for exception in raised)
    failure = facts.failure
    stepped = failure.shown > 0 if failure.step < 0 else failure.step > max(facts.resume_step, 0)
    if raised and same and len(ranks) == facts.world_size and not stepped:
        return f"every rank raised {short_exception(raised[0])} before its first step: mend the script"
    return None


def place_of(failure: Failure) -> str:
    """Where a job failed, in words; empty: not known.

    A script that does not number its steps is at the place that its process had
    come to since it was started.
    """
    if failure.step >= 0:
        return f"at step {failure.step}"
    if failure.shown > 0:
        return f"after {failure.shown} steps of its process"
    return BEFORE_ANY_STEP if failure.shown == 0 else ""


def is_same_fault(failure: Failure, other: Failure) -> bool:
    """Whether two failures are one and the same fault: of the same cause, at the same place."""
    return failure.cause == other.cause and place_of(failure) == place_of(other) != ""


def restore_fails(facts: RestartFacts, policy: RecoveryPolicy) -> str | None:
    """The copies of the state could not be brought, time after time: other code does not change that."""
    if facts.failed_restores >= policy.retry.max_attempts:
        return f"{facts.failed_restores} restores failed, one after the other"
    return None


def same_step_again(facts: RestartFacts, policy: RecoveryPolicy) -> str | None:
    """The job fails at one place again and again."""
    failure = facts.failure
    same = [
        earlier
        for earlier in facts.history
        if is_same_fault(earlier, failure) or (failure.step >= 0 and earlier.step == failure.step)
    ]
    count = 1 + len(same)
    if count >= policy.retry.max_failures_at_step:
        return f"failed {count} times {place_of(failure)} ({failure.cause})"
    return None


def no_progress(facts: RestartFacts, policy: RecoveryPolicy) -> str | None:
    """Failure follows failure without steady progress in between."""
    count = 1 + len(facts.history)
    if count >= policy.retry.max_failures_without_progress:
        steady = policy.progress
        return f"{count} failures without {steady.steady_steps} steps and {steady.steady_s:g} s of progress in between"
    return None


def attempts_exhausted(facts: RestartFacts, policy: RecoveryPolicy) -> str | None:
    """This incident was reattempted often enough."""
    if facts.attempts >= policy.retry.max_attempts:
        return f"{facts.attempts} reattempts did not bring the job back"
    return None


def ladder_ended(facts: RestartFacts, policy: RecoveryPolicy) -> str | None:
    """All rungs of the ladder left the fault unsolved, and it comes again and again."""
    return facts.unsolved or None


def newer_may_exist(facts: RestartFacts, policy: RecoveryPolicy) -> str | None:
    """A newer step may lie in a place that could not be listed, or in copies that could not be brought."""
    return facts.doubt or None


def copies_out_of_reach(facts: RestartFacts, policy: RecoveryPolicy) -> str | None:
    """The job would begin anew although copies of its state are there, which could not be brought."""
    if facts.restore_step > 0 or not facts.unreached:
        return None
    first = facts.unreached[0]
    return (
        f"{len(facts.unreached)} copies are there and could not be brought to where they are needed, "
        f"of rank {first.rank} at step {first.completed_steps} the {first.tier} on {first.machine}: {first.reason}"
    )


def fault_in_every_state(facts: RestartFacts, policy: RecoveryPolicy) -> str | None:
    """No state is left from before the loss was not finite, or before a version saved what only itself can read."""
    return facts.distrusted or None


def too_much_to_lose(facts: RestartFacts, policy: RecoveryPolicy) -> str | None:
    """The state that is left is many steps old, or none is left."""
    lost = facts.failure.step - max(facts.restore_step, 0)
    if facts.restore_step < 0 or lost <= policy.retry.max_lost_steps:
        return None
    if facts.restore_step == 0:
        return f"no checkpoint that all ranks can restore: a restart would lose {lost} steps ({facts.restore_reason})"
    return f"a restart from step {facts.restore_step} would lose {lost} steps ({facts.restore_reason})"


PARK_WHEN: tuple[Rule, ...] = (
    operator_must_decide,
    eviction_waits,
    machine_silent,
    ladder_asks,
    broken_from_the_start,
    restore_fails,
    same_step_again,
    no_progress,
    attempts_exhausted,
    ladder_ended,
    newer_may_exist,
    copies_out_of_reach,
    fault_in_every_state,
    too_much_to_lose,
)
"""The policy: the first rule that gives a reason parks the job."""

NOT_OVERRULED = frozenset({machine_silent, newer_may_exist, copies_out_of_reach})
"""Rules that an operator's resume does not override: a restart is impossible, or loses what was not given up."""


OF_THE_CODE = frozenset({broken_from_the_start, same_step_again, no_progress, attempts_exhausted, ladder_ended})
"""Rules that say nothing where another version of the code comes: what failed does not run again."""


COUNTED = OF_THE_CODE - {broken_from_the_start}
"""Rules that count failures. They say nothing of the first launch after a look at the machines had one of them leave:
what failed before failed with it."""


def judge(
    facts: RestartFacts,
    policy: RecoveryPolicy,
    *,
    by_operator: bool = False,
    other_code: str = "",
    found_out: bool = False,
    why: str = "",
) -> Verdict:
    """Reattempt, after a wait that grows from failure to failure, or park.

    Args:
        facts: What is looked at.
        policy: The limits.
        by_operator: An operator has just resumed the job: only ``NOT_OVERRULED`` counts, and nothing is waited for.
        other_code: Why another version of the code comes with the restart; empty: none does.
        found_out: A machine that a test or a replay found at fault has just left the job.
        why: Why it is worth to be tried again, as the ladder says; empty: it does not say.
    """
    for rule in PARK_WHEN:
        if (by_operator and rule not in NOT_OVERRULED) or (other_code and rule in OF_THE_CODE):
            continue
        if found_out and rule in COUNTED:
            continue
        if reason := rule(facts, policy):
            by_itself = rule in {machine_silent, eviction_waits} and not facts.evidence.problem
            silent = facts.evidence.unreachable if by_itself else ()
            return Verdict(Action.PARK, reason, rule=rule.__name__, silent=tuple(silent))
    if by_operator:
        return Verdict(Action.REATTEMPT, "an operator says so")
    if other_code:
        return Verdict(Action.REATTEMPT, other_code)
    if facts.failure.symptom is Symptom.UPDATE:
        return Verdict(Action.REATTEMPT, "the update was withdrawn: the job goes on as it is")
    wait_s = backoff_s(max(facts.attempts, len(facts.history)), policy)
    if facts.failure.symptom in GOES_ON:
        return Verdict(Action.REATTEMPT, "what was at fault has left the job", delay_s=wait_s)
    reason = f"{facts.failure.cause}: {why or 'assume a transient fault'}"
    return Verdict(Action.REATTEMPT, reason, delay_s=wait_s)


def backoff_s(failures_before: int, policy: RecoveryPolicy) -> float:
    """Seconds to wait before a reattempt: none the first time, then growing to a limit."""
    if failures_before == 0:
        return 0.0
    # Compare exponents first: a long history must not overflow a float.
    wait = policy.retry.backoff_initial_s
    for _ in range(failures_before - 1):
        wait *= policy.retry.backoff_factor
        if wait >= policy.retry.backoff_max_s:
            return policy.retry.backoff_max_s
    return min(wait, policy.retry.backoff_max_s)
