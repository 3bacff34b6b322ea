"""The rules of eviction, as one readable list: which evict a machine, and which say why one is not evicted.

The first is an operator's word. The next three are what figure 5 of ByteRobust does without a test (step 1 and, for
the network, its second alert), and one more is what it does after one (step 3). The others evict nobody: they say of
each other finding why it is not enough. What follows where no rule evicts is not decided here: the ladder says what is
tried next (``everstep.decisions.act.ladder``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from everstep.decisions.act.evict.by_operator import by_operator
from everstep.decisions.act.evict.facts import (
    ALERTS_WITHIN_S,
    REPEATED_FLAPS,
    SHARED_MACHINES,
    SHARED_SHARE,
    MachineFacts,
    is_alert,
    is_bad_link,
    is_failed_replay,
    is_failed_test,
    is_sure,
)
from everstep.model.diagnosis import is_tested
from everstep.model.eviction import EvictMode
from everstep.model.health import Finding, Health
from everstep.model.owner import Owner
from everstep.model.recovery_policy import RecoveryPolicy
from everstep.model.replay import is_replayed

ONE_ALERT_S = 30.0
"""Alerts of a machine that are less apart are one: of two links behind one switch, or of one link that is told anew
(ByteRobust looks at the network every 30 s, table 3)."""
SILENT = "silent-machine"
"""Reason code of what rests on silence, and on no finding."""
HANG, OVER_EVICTED = "hang", "hang-group"
"""Reason codes of a machine on which a job hangs, and of one that shares a parallel group with it."""
SLOW = "slow"
"""Reason code of a machine that slows its job down."""
OPERATOR = "operator"
"""Name of the rule that an operator's word is enough for."""
FAILED_TEST = "failed-test"
"""Name of the rule that goes by a test of the stopped machine."""
FAILED_REPLAY = "failed-replay"
"""Name of the rule that goes by a replay of the job."""
BAD_LINK = "bad-link"
"""Name of the rule that goes by a test between two machines."""
OF_LOOKING = frozenset({FAILED_TEST, FAILED_REPLAY, BAD_LINK})
"""Rules that go by what an incident looked for: tests of the stopped machines, and replays of the job."""
CULPRIT, GROUP = "hang-culprit", "hang-group"
"""Names of the rules about a hang."""
OF_A_HANG = frozenset({CULPRIT, GROUP})
"""Rules by which a machine leaves only where there is another one: else the job is tried again with it."""
OF_THE_JOB = frozenset({Owner.CODE, Owner.DATA})


@dataclass(frozen=True, slots=True)
class Said:
    """What a rule says of one machine, because of one finding or of its silence."""

    yes: bool
    reason: str
    why: str


@dataclass(frozen=True, slots=True)
class FixedNumber:
    """A number that a rule goes by and that no setting changes."""

    name: str
    value: float
    says: str
    source: str


@dataclass(frozen=True, slots=True)
class EvictRule:
    """One rule: data, and a function that keeps nothing."""

    name: str
    """In reports, settings and metrics; it does not change."""
    says: str
    """In one line."""
    source: str
    judge: Callable[[MachineFacts, RecoveryPolicy], Iterator[Said]]
    """Everything that the rule has to say of a machine."""
    evicts: bool = True
    """False: it only says why a machine is not evicted."""
    mode: EvictMode = EvictMode.ACT
    """As long as the policy of the job says nothing else."""
    settings: tuple[str, ...] = ()
    """Numbers that it goes by, as the policy calls them."""
    fixed: tuple[FixedNumber, ...] = ()
    """Its other numbers."""


def _operator(seen: MachineFacts, policy: RecoveryPolicy) -> Iterator[Said]:
    for found in filter(by_operator, seen.findings):
        yield Said(True, found.reason, found.headline)


def _sure_machine_fault(seen: MachineFacts, policy: RecoveryPolicy) -> Iterator[Said]:
    for found in seen.findings:
        if not is_sure(found) or is_failed_test(found) or is_failed_replay(found) or by_operator(found):
            continue
        spread = seen.widespread(found.reason)
        yield Said(not spread, found.reason, f"{found.headline}: {spread or 'it names this machine for sure'}")


def _failed_test(seen: MachineFacts, policy: RecoveryPolicy) -> Iterator[Said]:
    for found in filter(is_failed_test, seen.findings):
        spread = seen.widespread(found.reason)
        yield Said(not spread, found.reason, f"{found.headline}: {spread or 'a test of the stopped machine says so'}")


def _bad_link(seen: MachineFacts, policy: RecoveryPolicy) -> Iterator[Said]:
    for found in filter(is_bad_link, seen.findings):
        spread = seen.widespread(found.reason)
        one_of_two = "over-eviction: one of the two leaves, since the job cannot run over that link"
        yield Said(not spread, found.reason, f"{found.headline}: {spread or one_of_two}")


def _failed_replay(seen: MachineFacts, policy: RecoveryPolicy) -> Iterator[Said]:
    for found in filter(is_failed_replay, seen.findings):
        spread = seen.widespread(found.reason)
        yield Said(not spread, found.reason, f"{found.headline}: {spread or 'a replay of the job says so'}")


def _repeated_network_alert(seen: MachineFacts, policy: RecoveryPolicy) -> Iterator[Said]:
    for found in filter(is_alert, seen.findings):
        if spread := seen.widespread(found.reason):
            yield Said(False, found.reason, f"{found.headline}: {spread}")
        elif found.reason in REPEATED_FLAPS:
            yield Said(True, found.reason, f"{found.headline}: one link went down twice")
        elif other := _second(found, seen.alerts):
            apart_s = abs(other.since_ns - found.since_ns) / 1e9
            yield Said(True, found.reason, f"{found.headline}: {apart_s:.0f} s from another alert, {other.headline}")
        else:
            within = f"the second within {ALERTS_WITHIN_S:.0f} s evicts"
            yield Said(False, found.reason, f"{found.headline}: one network alert is tolerated, {within}")


def _second(found: Finding, alerts: tuple[Finding, ...]) -> Finding | None:
    """Another alert that counts together with this one; none with the end of an outage that is among them."""
    near = (ONE_ALERT_S, ALERTS_WITHIN_S)
    others = alerts if found in alerts else ()
    return next((one for one in others if near[0] <= abs(one.since_ns - found.since_ns) / 1e9 <= near[1]), None)


def _gone_machine(seen: MachineFacts, policy: RecoveryPolicy) -> Iterator[Said]:
    if seen.stepping:
        yield Said(False, SILENT, "its agent is silent, and its ranks step: the machine works")
        return
    if seen.silent_s is None:
        return
    heard = f"nothing was heard from its agent and ranks for {seen.silent_s:.1f} s"
    if seen.silent_s < policy.silent_evict_s:
        yield Said(False, SILENT, f"{heard}: it has {policy.silent_evict_s:g} s to answer")
    else:
        yield Said(True, SILENT, f"{heard}: it is gone")


def _hang_culprit(seen: MachineFacts, policy: RecoveryPolicy) -> Iterator[Said]:
    if seen.hang and not seen.hang.over_evicts:
        yield Said(True, HANG, f"the job hangs: {seen.hang.reason}")


def _hang_over_evict(seen: MachineFacts, policy: RecoveryPolicy) -> Iterator[Said]:
    if (found := seen.hang) is None or not found.over_evicts:
        return
    count = f"{found.innocent} of {len(found.machines)} machines leave though nothing points at them"
    own = "one of its ranks is an outlier" if seen.machine in found.suspects else "it leaves on purpose"
    yield Said(True, OVER_EVICTED, f"over-eviction, {count}; {own}. The job hangs: {found.reason}")


def _slow_machine(seen: MachineFacts, policy: RecoveryPolicy) -> Iterator[Said]:
    if seen.slow:
        yield Said(seen.machine in seen.slow.machines, SLOW, f"the job became slow: {seen.slow.reason}")


def _application_caused(seen: MachineFacts, policy: RecoveryPolicy) -> Iterator[Said]:
    for found in seen.findings:
        if found.owner in OF_THE_JOB:
            why = f"owner {found.owner}: what one job says of itself evicts no machine"
            yield Said(False, found.reason, f"{found.headline}: {why}")


def _unknown_verdict(seen: MachineFacts, policy: RecoveryPolicy) -> Iterator[Said]:
    for found in seen.findings:
        if found.verdict is not Health.FAULTY and found.owner not in OF_THE_JOB and not is_alert(found):
            yield Said(False, found.reason, f"{found.headline}: the verdict is {found.verdict}, and that is no fault")


def _unsure_fault(seen: MachineFacts, policy: RecoveryPolicy) -> Iterator[Said]:
    for found in seen.findings:
        if found.verdict is Health.FAULTY and found.owner is Owner.MACHINE and not (found.sure or _looked_at(found)):
            yield Said(False, found.reason, f"{found.headline}: it does not name the machine for sure; a test has to")


def _looked_at(found: Finding) -> bool:
    """Whether the machine was stopped and looked at for it: no further test is waited for."""
    return is_tested(found) or is_replayed(found)


def _other_owner(seen: MachineFacts, policy: RecoveryPolicy) -> Iterator[Said]:
    told = OF_THE_JOB | {Owner.MACHINE, Owner.NETWORK}
    for found in seen.findings:
        if found.verdict is Health.FAULTY and found.owner not in told:
            yield Said(False, found.reason, f"{found.headline}: owner {found.owner}, so not this machine alone")


SHARED = (
    FixedNumber("shared_share", SHARED_SHARE, "More than this share of the machines have it now: it is shared", ""),
    FixedNumber("shared_machines", SHARED_MACHINES, "And more machines than these have it", ""),
)
"""When a fault, or an alert, is none of the machine."""
ALERTS = (
    FixedNumber("alerts_within_s", ALERTS_WITHIN_S, "Two alerts within this count together", "ByteRobust, figure 5"),
    FixedNumber("one_alert_s", ONE_ALERT_S, "Two alerts that are closer than this are one", ""),
)
"""Which alerts of a machine count together."""

RULES: tuple[EvictRule, ...] = (
    EvictRule(
        OPERATOR,
        "an operator takes the machine out: neither a mode nor the breaker has anything to say",
        "",
        _operator,
    ),
    EvictRule(
        "sure-machine-fault",
        "a fault that names the machine for sure, and that the machines do not share: evict at once",
        "ByteRobust, figure 5, step 1; that shared faults are left out is ours",
        _sure_machine_fault,
        fixed=SHARED,
    ),
    EvictRule(
        "repeated-network-alert",
        f"one network alert is tolerated, the second of a machine within {ALERTS_WITHIN_S:.0f} s evicts",
        "ByteRobust, figure 5; what counts as one alert is ours",
        _repeated_network_alert,
        fixed=ALERTS + SHARED,
    ),
    EvictRule(
        "gone-machine",
        "agent and ranks of the machine are silent",
        "the paper gives no heartbeat limit",
        _gone_machine,
        settings=("silent_evict_s",),
    ),
    EvictRule(
        FAILED_TEST,
        "a test of the machine, whose ranks are stopped, finds it at fault, and the machines do not share that",
        "ByteRobust, section 4.2: suspects of a diagnosis are evicted; that shared faults are left out is ours",
        _failed_test,
        fixed=SHARED,
    ),
    EvictRule(
        BAD_LINK,
        "a test of the stopped machines finds that the link between two of them does not work: one of them leaves",
        "each of the two may work, so this is over-eviction",
        _bad_link,
        fixed=SHARED,
    ),
    EvictRule(
        FAILED_REPLAY,
        "the job's script, run on groups of the stopped machines, breaks or computes other bits where this one is in",
        "ByteRobust, section 6, algorithm 1: the intersection is evicted; that shared faults are left out is ours",
        _failed_replay,
        fixed=SHARED,
    ),
    EvictRule(
        CULPRIT,
        "the job stood still, and looks at all ranks name this machine's, for which the others wait",
        "the wait-for graph (docs/concepts/hangs.md); the paper over-evicts",
        _hang_culprit,
    ),
    EvictRule(
        GROUP,
        "the job stood still, and the machine is of the smallest parallel group that the outliers share: over-eviction",
        "ByteRobust, section 5.1, figure 7",
        _hang_over_evict,
    ),
    EvictRule(
        "slow-machine",
        "the job became slow, a vote over looks at all ranks names this machine, and its ranks' own past agrees",
        "ByteRobust, section 5.1: five rounds, the one with most flags; that its ranks' past has to agree is ours",
        _slow_machine,
    ),
    EvictRule(
        "application-caused",
        "code and data of a job evict no machine: that takes more than one job's own evidence",
        "ByteRobust, section 4.1: rollback, not eviction",
        _application_caused,
        evicts=False,
    ),
    EvictRule("unknown-verdict", "what could not be looked at is no fault", "", _unknown_verdict, evicts=False),
    EvictRule(
        "unsure-fault",
        "a fault that does not name the machine for sure waits for a test",
        "ByteRobust, figure 5, step 3: stop-time checks",
        _unsure_fault,
        evicts=False,
    ),
    EvictRule(
        "other-owner",
        "storage, scheduler and whoever is not known: another machine has the same",
        "",
        _other_owner,
        evicts=False,
    ),
)
"""In the order in which they are asked; the first that evicts is the one that is named."""


def mode_of(rule: EvictRule, policy: RecoveryPolicy) -> EvictMode:
    """How far a rule may go: as its own mode says, and never further than ``evict_mode``.

    A word that this release does not know asks an operator. What an operator said is done.
    """
    if rule.name == OPERATOR:
        return EvictMode.ACT
    order = (EvictMode.ACT, EvictMode.APPROVE, EvictMode.SHADOW, EvictMode.OFF)
    known = [
        mode if mode in order else EvictMode.APPROVE
        for mode in (policy.evict_mode, policy.evict_rules.get(rule.name, rule.mode))
    ]
    return max(known, key=order.index)
