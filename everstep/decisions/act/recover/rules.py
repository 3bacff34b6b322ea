"""The restart rules of a stopped job are one ordered list: the first rule that has a verdict decides.

The first rules test the machines if the ladder chose that, or search for newer copies. Most rules park the job for an
operator. If no rule parks the job, it is launched again. ByteRobust does not state how often a job is launched again.
Here the limits are settings of :class:`~everstep.model.recovery_policy.RecoveryPolicy`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from everstep.base.text import listed
from everstep.decisions.act.ladder.next_rung import NextRung
from everstep.decisions.act.progress import is_same_fault, position_of
from everstep.decisions.act.recover.doubt import Doubt
from everstep.decisions.act.versions.next_version import VersionChange
from everstep.decisions.blame.first_failure import is_victim, short_exception
from everstep.decisions.blame.service import failed_service
from everstep.model.evidence import Evidence
from everstep.model.incident import STILL_RUNNING, Failure, Symptom
from everstep.model.ladder import Rung
from everstep.model.recovery_policy import RecoveryPolicy
from everstep.model.state_copy import StateCopies, count_of


class Action(StrEnum):
    """The next action about a stopped job."""

    SEARCH = "search"
    """Ask all locations that may have further copies, and decide again."""
    DIAGNOSE = "diagnose"
    """Test the machines, and decide again."""
    REPLAY = "replay"
    """Replay the job on groups of its machines, and decide again."""
    REATTEMPT = "reattempt"
    """Launch the job again."""
    PARK = "park"
    """Wait for an operator, or for silent machines."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict of a rule: the action, the rule, and the reason."""

    action: Action
    text: str
    """The reason, for people."""
    rule: str = ""
    """Name of the rule that decided. The name is also the reason code, and it stays the same in all releases."""
    delay_s: float = 0.0
    """How long to wait before the action, seconds."""
    awaited: tuple[str, ...] = ()
    """Silent machines for which a parked job waits: once they answer, it continues without an operator."""


@dataclass(frozen=True, slots=True)
class RestartFacts:
    """The facts that the rules read."""

    failure: Failure
    """The current failure."""
    history: tuple[Failure, ...]
    """Earlier failures that are not solved, oldest first, without the current failure."""
    attempts: int
    """The number of reattempts of this incident so far."""
    evidence: Evidence
    restore_step: int
    """The step from which a restart would resume; -1: the script restores by itself."""
    world_size: int
    resume_step: int = 0
    """The step at which the failed generation had begun."""
    restore_reason: str = ""
    """Why a restart would resume from ``restore_step``."""
    unreached: tuple[StateCopies, ...] = ()
    """Copies that exist and are out of reach of the machines that need them, with reasons."""
    doubt: Doubt | None = None
    """The doubt about a restart; None: the step is certain, or the doubt was not examined."""
    asked: int = 0
    """How often storage was asked for copies."""
    accepted: bool = False
    """An operator lets the job resume from ``restore_step`` although newer steps may exist."""
    needs_operator: str = ""
    """Why an operator has to decide how the job resumes; empty: no decision is needed."""
    waits: str = ""
    """Why machines that are to leave the job are still in it; empty: there are no such machines."""
    rung: NextRung | None = None
    """The rung that the ladder chose; None: the ladder was not asked."""
    failed_restores: int = 0
    """The number of failed restores since the last launch, or since an operator resumed."""
    readable_until: int | None = None
    """The newest step that the running version can restore, since a version that was rolled back saved the later ones;
    None: any step."""
    sound_until: int | None = None
    """The newest step without the fault, if the fault is in the saved state; None: any step."""
    fault: str = ""
    """The description of the fault that is in the saved state."""
    change: VersionChange | None = None
    """Another version of the code that is launched with a restart; None: the version does not change."""
    failed_machine_left: bool = False
    """A machine that failed a test or a replay has left the job since the last launch."""
    replaced: bool = False
    """Some machine has left the job since the last launch."""
    by_operator: bool = False
    """An operator has just resumed the job."""
    trains_well: bool = False
    """The job trains far longer between its failures than a restart costs, and fails at another place each time."""
    service: str = ""
    """The service that failed and that all machines share; empty: no such service is known."""

    def is_in_vain(self, policy: RecoveryPolicy) -> bool:
        """Return whether a newer step may exist although it was searched for as often as the policy allows."""
        return (
            self.doubt is not None and not (self.doubt.to_ask or self.accepted) and self.asked >= policy.storage.tries
        )


Decide = Callable[[RestartFacts, RecoveryPolicy], Verdict | None]


@dataclass(frozen=True, slots=True)
class RestartRule:
    """A rule, and the conditions under which it is not asked."""

    name: str
    decide: Decide
    binds_operator: bool = False
    """An operator's resume does not overrule the rule: a restart would be impossible, or would lose steps that nobody
    has given up."""
    of_the_code: bool = False
    """The rule is not asked if another version of the code is launched, since it judges the failed version."""
    counts_failures: bool = False
    """The rule counts failures. After a machine at fault has left, the rule is not asked for the first launch, since
    that machine may have caused the failures; the breaker stops too many evictions. The rule is also not asked while
    the job trains well in spite of its failures."""

    def applies(self, facts: RestartFacts) -> bool:
        """Return whether the rule is asked."""
        overruled = facts.by_operator and not self.binds_operator
        other_code = facts.change is not None and self.of_the_code
        excused = facts.failed_machine_left or facts.replaced or facts.trains_well
        return not (overruled or other_code or (excused and self.counts_failures))


def _park(text: str) -> Verdict:
    return Verdict(Action.PARK, text)


BEFORE_A_RESTART = {Rung.DIAGNOSE: Action.DIAGNOSE, Rung.REPLAY: Action.REPLAY}
"""Rung that tests the machines while the job is stopped → its action. A new decision follows the action."""


def look_at_machines(facts: RestartFacts, policy: RecoveryPolicy) -> Verdict | None:
    """The next rung of the ladder tests the machines, or replays the job on them."""
    rung = facts.rung
    if rung is None or rung.rung not in BEFORE_A_RESTART or rung.asks:
        return None
    return Verdict(BEFORE_A_RESTART[rung.rung], rung.text)


def search_for_newer(facts: RestartFacts, policy: RecoveryPolicy) -> Verdict | None:
    """A newer step may be in a location that was not asked yet, or that may answer when it is asked again."""
    if facts.doubt is None:
        return None
    if facts.doubt.to_ask:
        return Verdict(Action.SEARCH, facts.doubt.text)
    if facts.accepted or facts.is_in_vain(policy):
        return None
    delay_s = policy.storage.wait_initial_s
    for _ in range(facts.asked - 1):
        delay_s = min(delay_s * policy.storage.wait_factor, policy.storage.wait_max_s)
    text = f"{facts.doubt.text}; asked again in {delay_s:g} s"
    return Verdict(Action.SEARCH, text, delay_s=min(delay_s, policy.storage.wait_max_s))


def operator_must_decide(facts: RestartFacts, policy: RecoveryPolicy) -> Verdict | None:
    """An operator has to decide how the job resumes: its last incident of this fault was closed from outside."""
    return _park(facts.needs_operator) if facts.needs_operator else None


def eviction_waits(facts: RestartFacts, policy: RecoveryPolicy) -> Verdict | None:
    """Machines are to be evicted, and wait for an operator's approval or for a replacement."""
    if not facts.waits:
        return None
    awaited = () if facts.evidence.problem else tuple(facts.evidence.unreachable)
    by_itself = f"; the job also goes on by itself once {listed(awaited)} answers" if awaited else ""
    return Verdict(Action.PARK, f"{facts.waits}{by_itself}", awaited=awaited)


def machine_silent(facts: RestartFacts, policy: RecoveryPolicy) -> Verdict | None:
    """A machine that does not answer cannot take part in a restart at full width."""
    if facts.evidence.problem or facts.evidence.dying:
        left = facts.evidence.problem or "; ".join(facts.evidence.dying.values())
        return _park(f"the machines could not be stopped: {left}")
    if not (silent := facts.evidence.unreachable):
        return None
    do = "; ".join(dict.fromkeys(facts.evidence.refusing.values())) or "start the agent there"
    if facts.evidence.cut_off:
        do = "no other machine of the cluster answers: check the network of the workers"
    text = f"no answer of {', '.join(silent)}: {do}, and the job continues without an operator"
    return Verdict(Action.PARK, text, awaited=tuple(silent))


def ladder_asks(facts: RestartFacts, policy: RecoveryPolicy) -> Verdict | None:
    """The next rung of the ladder needs an operator's approval."""
    if facts.rung is None or not facts.rung.asks:
        return None
    return _park(
        f"an operator has to approve the next rung of the ladder, {facts.rung.rung} ('everstep approve'), or skip it "
        f"('everstep resume'): {facts.rung.text}"
    )


UNFIT_EXCEPTION = "CheckpointError"
"""The end of the name of the exception that a rank raises if a complete checkpoint does not fit the script."""


def service_failed(facts: RestartFacts, policy: RecoveryPolicy) -> Verdict | None:
    """A service that all machines share failed: the job is launched again until it works, or for `retry.service_h`."""
    if not facts.service or facts.replaced:
        return None
    since_ns = facts.failure.time_ns
    for earlier in reversed(facts.history):
        if not failed_service(earlier.classification, everywhere=True):
            break
        since_ns = min(since_ns, earlier.time_ns)
    away_s, allowed_s = (facts.failure.time_ns - since_ns) / 1e9, policy.retry.service_h * 3600
    if away_s >= allowed_s:
        return _park(
            f"{facts.service}: it has failed for {away_s / 60:.0f} min, and {allowed_s / 60:.0f} min are allowed"
        )
    text = f"{facts.service}: no machine and no code is to blame; launched again for up to {allowed_s / 60:.0f} min"
    return Verdict(Action.REATTEMPT, text, delay_s=backoff_s(max(facts.attempts, len(facts.history)), policy))


def broken_from_the_start(facts: RestartFacts, policy: RecoveryPolicy) -> Verdict | None:
    """Every rank raised the same exception before its first step: another launch cannot help.

    It may help if all of them only report that other ranks did not arrive. Exceptions about a state that does not fit
    the script count as the same exception, although each rank names its own tensors.
    """
    own = [end for end in facts.evidence.exits if end.exception and not end.stopped_by_us]
    raised = [end.exception for end in own]
    same = len(set(raised)) == 1 or all(exception.split(":")[0].endswith(UNFIT_EXCEPTION) for exception in raised)
    failure = facts.failure
    stepped = failure.shown > 0 if failure.step < 0 else failure.step > max(facts.resume_step, 0)
    if not (raised and same and sum(len(end.ranks) for end in own) == facts.world_size) or stepped:
        return None
    if all(is_victim(end) for end in own):
        return None
    return _park(f"every rank raised {short_exception(raised[0])} before its first step: repair the script")


def _limit(
    setting: str, count: Callable[[RestartFacts], int], when: str, text: str, *, of_failures: bool = True
) -> Decide:
    """Make a rule that parks a job once a count reaches a limit of the policy.

    Args:
        setting: Name of the limit, e.g. ``retry.max_attempts``; 0 switches the rule off.
        count: The function that counts.
        when: The docstring of the rule: when it parks the job.
        text: Format of the verdict's text, with ``count``, ``failure``, ``at`` (its position) and ``steady``.
        of_failures: Whether the text ends with the rungs that were tried.
    """

    def decide(facts: RestartFacts, policy: RecoveryPolicy) -> Verdict | None:
        limit, counted = policy.value(setting), count(facts)
        if not limit or counted < limit:
            return None
        reached = text.format(
            count=counted, failure=facts.failure, at=position_of(facts.failure), steady=policy.progress
        )
        tried = facts.rung.text if of_failures and facts.rung and facts.rung.tried else ""
        return _park("; ".join(filter(None, [reached, tried])))

    decide.__doc__ = f"{when} (`{setting}`)."
    return decide


def _at_one_position(facts: RestartFacts) -> int:
    """Return how often the job failed at the current position."""
    failure = facts.failure
    return 1 + sum(
        is_same_fault(earlier, failure) or earlier.step == failure.step >= 0
        for earlier in facts.history
        if not earlier.explained
    )


def _restarts_after_the_ladder(facts: RestartFacts) -> int:
    """Return how often the job was launched again after the last rung; -1: a rung is left."""
    return facts.rung.restarts if facts.rung and facts.rung.last else -1


def newer_may_exist(facts: RestartFacts, policy: RecoveryPolicy) -> Verdict | None:
    """A newer step may be in a location that could not be listed, or in copies that are out of reach."""
    if facts.doubt is None or not facts.is_in_vain(policy):
        return None
    certain = "no step is certain" if facts.restore_step < 1 else f"only step {facts.restore_step} is certain"
    return _park(
        f"{facts.doubt.text}; {certain}. Make these locations answer and resume, or resume with accept_loss to give "
        "newer steps up"
    )


def copies_out_of_reach(facts: RestartFacts, policy: RecoveryPolicy) -> Verdict | None:
    """The job would begin from nothing, although copies of its state exist that cannot be reached now."""
    if facts.restore_step > 0 or not facts.unreached:
        return None
    first = facts.unreached[0]
    return _park(
        f"{count_of(facts.unreached)} copies exist and are out of reach of the machines that need them, e.g. the "
        f"{first.tier} of rank {first.ranks.first} at step {first.completed_steps} on {first.machine}: {first.reason}"
    )


def state_unreadable(facts: RestartFacts, policy: RecoveryPolicy) -> Verdict | None:
    """All steps that are left were saved by a version that was rolled back. The running version cannot restore them."""
    if not is_unreadable(facts.restore_step, facts.readable_until):
        return None
    return _park(
        "the running version cannot restore the steps of a version that was rolled back, and no checkpoint of "
        f"step {facts.readable_until} or before is left that all ranks can restore: update the job to code that can "
        "restore them"
    )


def fault_in_every_state(facts: RestartFacts, policy: RecoveryPolicy) -> Verdict | None:
    """All copies that are left were saved after the loss was no longer finite."""
    if not is_unsound(facts.restore_step, facts.sound_until):
        return None
    before = f"of step {facts.sound_until} or before" if (facts.sound_until or 0) > 0 else "from before that"
    return _park(
        f"{facts.fault}, and no checkpoint {before} is left that all ranks can restore: the newest checkpoint, "
        f"of step {facts.restore_step}, has the fault in it. 'everstep resume' continues from that one"
    )


def is_unreadable(step: int, readable_until: int | None) -> bool:
    """Return whether the running version can restore none of the steps that are left."""
    return readable_until is not None and step < 1 <= readable_until


def is_unsound(step: int, sound_until: int | None) -> bool:
    """Return whether the state from which a restart would resume contains the fault."""
    return sound_until is not None and step > sound_until


def too_much_to_lose(facts: RestartFacts, policy: RecoveryPolicy) -> Verdict | None:
    """A restart would lose many steps: the newest state is too old, or no state is left."""
    lost = facts.failure.step - max(facts.restore_step, 0)
    if facts.restore_step < 0 or lost <= policy.retry.max_lost_steps:
        return None
    if facts.restore_step == 0:
        return _park(
            f"no checkpoint that all ranks can restore: a restart would lose {lost} steps ({facts.restore_reason})"
        )
    return _park(f"a restart from step {facts.restore_step} would lose {lost} steps ({facts.restore_reason})")


def resumed(facts: RestartFacts, policy: RecoveryPolicy) -> Verdict | None:
    """An operator resumed the job: it is launched again, without a delay."""
    return Verdict(Action.REATTEMPT, "resumed by an operator") if facts.by_operator else None


def other_code(facts: RestartFacts, policy: RecoveryPolicy) -> Verdict | None:
    """Another version of the code is launched, without a delay."""
    return Verdict(Action.REATTEMPT, facts.change.why) if facts.change else None


def update_withdrawn(facts: RestartFacts, policy: RecoveryPolicy) -> Verdict | None:
    """The job was stopped for an update that was withdrawn: it is launched again, without a delay."""
    if facts.failure.symptom is not Symptom.UPDATE:
        return None
    return Verdict(Action.REATTEMPT, "the update was withdrawn: the job continues without a change")


def try_again(facts: RestartFacts, policy: RecoveryPolicy) -> Verdict:
    """The job is launched again, after a delay that grows from failure to failure whose cause is not known."""
    rung, gone = facts.rung, "the machine at fault has left the job"
    if facts.failure.symptom in STILL_RUNNING:
        text = gone
    elif rung is not None and rung.is_explained:
        text = f"{facts.failure.cause}: {gone if facts.replaced else ASSUMED}"
    else:
        text = f"{facts.failure.cause}: {rung.text if rung is not None and rung.tried else ASSUMED}"
    unclear = sum(not failure.explained for failure in facts.history)
    return Verdict(Action.REATTEMPT, text, delay_s=backoff_s(max(facts.attempts, unclear), policy))


ASSUMED = "assume a transient fault"
"""Why a job is launched again if no cause is known."""

RULES: tuple[RestartRule, ...] = (
    RestartRule("look-at-machines", look_at_machines),
    RestartRule("search-for-newer", search_for_newer, binds_operator=True),
    RestartRule("operator-must-decide", operator_must_decide),
    RestartRule("eviction-waits", eviction_waits),
    RestartRule("machine-silent", machine_silent, binds_operator=True),
    RestartRule("ladder-asks", ladder_asks),
    RestartRule("service-failed", service_failed, of_the_code=True),
    RestartRule("broken-from-the-start", broken_from_the_start, of_the_code=True),
    RestartRule(
        "restore-fails",
        _limit(
            "retry.max_attempts",
            lambda facts: facts.failed_restores,
            "Too many restores failed, one after the other",
            "{count} restores failed, one after the other",
            of_failures=False,
        ),
    ),
    RestartRule(
        "same-step-again",
        _limit(
            "retry.max_failures_at_step",
            _at_one_position,
            "The job failed too often at one step",
            "failed {count} times {at} ({failure.cause})",
        ),
        of_the_code=True,
        counts_failures=True,
    ),
    RestartRule(
        "no-progress",
        _limit(
            "retry.max_failures_without_progress",
            lambda facts: 1 + sum(not earlier.explained for earlier in facts.history),
            "The job failed too often without steady progress in between",
            "{count} failures without {steady.steady_steps} steps and {steady.steady_s:g} s of progress in between",
        ),
        of_the_code=True,
        counts_failures=True,
    ),
    RestartRule(
        "attempts-exhausted",
        _limit(
            "retry.max_attempts",
            lambda facts: facts.attempts,
            "The incident reattempted the job too often",
            "{count} reattempts did not bring the job back",
        ),
        of_the_code=True,
        counts_failures=True,
    ),
    RestartRule(
        "ladder-ended",
        _limit(
            "ladder.restarts",
            _restarts_after_the_ladder,
            "The fault returned after too many restarts that followed the last rung of the ladder",
            "the fault returned after {count} restarts that followed the last rung of the ladder",
        ),
        of_the_code=True,
        counts_failures=True,
    ),
    RestartRule("newer-may-exist", newer_may_exist, binds_operator=True),
    RestartRule("copies-out-of-reach", copies_out_of_reach, binds_operator=True),
    RestartRule("state-unreadable", state_unreadable),
    RestartRule("fault-in-every-state", fault_in_every_state),
    RestartRule("too-much-to-lose", too_much_to_lose),
    RestartRule("resumed", resumed, binds_operator=True),
    RestartRule("other-code", other_code),
    RestartRule("update-withdrawn", update_withdrawn),
    RestartRule("try-again", try_again),
)
"""The rules in order; the last rule always has a verdict."""


def decide(facts: RestartFacts, policy: RecoveryPolicy) -> Verdict:
    """Return the verdict of the first rule that has one, with the name of the rule."""
    for rule in RULES:
        if rule.applies(facts) and (verdict := rule.decide(facts, policy)):
            return Verdict(verdict.action, verdict.text, rule.name, verdict.delay_s, verdict.awaited)
    raise AssertionError("the last rule always has a verdict")


def backoff_s(failures_before: int, policy: RecoveryPolicy) -> float:
    """Return the seconds to wait before a reattempt: 0 the first time, then growing to a limit."""
    if failures_before == 0:
        return 0.0
    wait = policy.retry.backoff_initial_s  # multiplied in a loop, since a power may overflow a float
    for _ in range(failures_before - 1):
        wait *= policy.retry.backoff_factor
        if wait >= policy.retry.backoff_max_s:
            return policy.retry.backoff_max_s
    return min(wait, policy.retry.backoff_max_s)
