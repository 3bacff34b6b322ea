"""The ladder of stop-time checks for one incident: from what is known of it to the rung that comes next."""

from __future__ import annotations

from everstep.decisions.act.ladder.facts import LadderFacts
from everstep.decisions.act.ladder.next import LadderStep, next_rung
from everstep.decisions.act.recover.state import RecoveryState
from everstep.decisions.act.versions.rollback import came_within, rollback, target_of
from everstep.decisions.blame.diagnose.choose_tests import Choice, choose_tests
from everstep.decisions.blame.replay.group_jobs import why_not
from everstep.model.incident import Failure
from everstep.model.recovery_policy import RecoveryPolicy
from everstep.model.version import JobVersion


def tests_of(state: RecoveryState) -> Choice:
    """The tests that follow the failure at hand."""
    failure, policy = state.failures[-1], state.spec.policy
    found = failure.classification
    known = found is not None and not found.consequence
    fault, owner = (found.fault, found.owner) if found is not None else ("", "")
    return choose_tests(failure.symptom, fault, owner if known else "", off=policy.diagnose.off)


def climb(state: RecoveryState) -> LadderStep:
    """What is done next about the failure at hand."""
    state.clear_code()
    failure, policy, book = state.failures[-1], state.spec.policy, state.book
    versions = list(book.versions.values())
    running = book.versions.get(book.running)
    blamed = rollback(versions, book.running, failure, explained=state.is_explained, policy=policy)
    target = target_of(versions, book.running) if running is not None else None
    facts = LadderFacts(
        failure=failure,
        explained=state.is_dealt_with,
        hinted=state.hinted,
        tried=tuple(state.ladder.tried),
        remembered=tuple(state.ladder.remembered),
        of_script=state.ladder.of_script,
        blamed=blamed.why if blamed else "",
        recent=running is not None and came_within(running, failure.time_ns, policy.rollback.error_within_h * 3600.0),
        back_to=target.name if target else "",
        tests=tests_of(state).tests,
        unsolved=state.unsolved,
        ran_well=_ran_well(running, failure, policy) if running else "",
        no_replay=why_not(state.spec, state.showing),
        diagnose_at_once=policy.diagnose.at_once,
        approved=frozenset(state.ladder.approved),
    )
    return next_rung(facts, policy)


def _ran_well(running: JobVersion, failure: Failure, policy: RecoveryPolicy) -> str:
    """Why the version that runs is not to blame for what comes at another place each time; empty: nothing says so."""
    hours = (failure.time_ns - running.began_ns) / 3600e9
    if not running.steady or hours < policy.rollback.error_within_h:
        return ""
    return f"v{running.number} ran well for {hours:.0f} h, and it fails at another step each time"
