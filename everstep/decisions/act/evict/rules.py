"""The table of eviction rules says which findings evict their machine, and why other findings do not.

Every suspicion of a machine is a ``Finding``. Its source is an inspection, a test, a replay, samples of a hang or of a
slow job, silence, or an operator (``FindingSource``). The first row that fits a finding answers it. The first four rows
are an operator's request and the evictions that ByteRobust makes without a test (figure 5). The next rows answer
findings of tests and replays of stopped machines, of errors that come again, of hangs, and of slow machines. The last
four rows evict no machine: they explain why a finding is not enough. If no rule evicts a machine, the ladder decides
what is tried next (``everstep.decisions.act.ladder``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from everstep.decisions.blame.alerts import (
    ALERTS_WITHIN_S,
    DOWN_FOR_GOOD_S,
    ONE_ALERT_S,
    REPEATED_FLAPS,
    is_alert,
    is_down_for_good,
    second_alert,
)
from everstep.decisions.blame.repeated_errors import REPEATS
from everstep.decisions.blame.shared_fault import SHARED_MACHINES, SHARED_SHARE, is_shared
from everstep.model.eviction import EvictMode
from everstep.model.finding import Finding, FindingSource, Health, Owner
from everstep.model.recovery_policy import RecoveryPolicy

OPERATOR = "operator"
"""Name of the rule that evicts a machine because an operator asked for it."""
GONE = "gone-machine"
"""Name of the rule that evicts a machine because it does not answer, or does not end its ranks."""
OF_THE_JOB = frozenset({Owner.CODE, Owner.DATA})


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """The facts about one machine of a job at one moment."""

    machine: str
    findings: tuple[Finding, ...]
    """The active findings about the machine, the worst first."""
    alerts: tuple[Finding, ...]
    """The machine's network alerts, active and earlier, the oldest first; each alert once."""
    machines: int
    """The number of machines of the job."""
    alike: Mapping[str, int]
    """Reason code → the number of machines of the job that have such a fault now."""
    now_ns: int = 0
    """The time of the decision; 0: not known."""
    stopped: bool = False
    """Whether the ranks are stopped: the job failed, or is about to be launched again."""

    def is_shared(self, reason: str) -> bool:
        """Return whether so many machines have a fault that its cause is outside of them."""
        return is_shared(self.alike.get(reason, 0), self.machines)


@dataclass(frozen=True, slots=True)
class FixedNumber:
    """A number that a rule uses and that no setting changes."""

    name: str
    value: float
    meaning: str
    source: str


@dataclass(frozen=True, slots=True)
class EvictRule:
    """One row: the findings that the rule answers, and its answer."""

    name: str
    """The stable name of the rule in reports, settings and metrics."""
    asks: str
    """The condition of the rule and its answer, in one line."""
    paper: str
    """The source of the rule."""
    fits: Callable[[Finding], bool]
    """Whether the rule answers a finding."""
    because: str = ""
    """The text that the answer adds to the finding's own text, as a format of ``finding``."""
    evicts: bool = True
    """Whether a finding with the verdict faulty evicts its machine; False: the rule explains why the machine stays."""
    unless_shared: bool = False
    """Whether a shared fault, which more than half of the machines have, evicts none of them."""
    decide: Callable[[Finding, MachineFacts], tuple[bool, str]] | None = None
    """A function that returns the answer and the text that it adds, for a rule that needs more than the finding."""
    waits: bool = True
    """Whether the job waits if the pool has no replacement for the machine; False: the job is then launched again with
    the same machine, since the software may have caused the fault."""
    until_released: bool = False
    """Whether the pool keeps the machine until an operator releases it, since only a test or a replay detects the
    fault."""
    mode: EvictMode = EvictMode.ACT
    """How far the rule may go, unless the policy of the job sets another mode."""
    settings: tuple[str, ...] = ()
    """The settings of the policy that the rule uses."""
    fixed: tuple[FixedNumber, ...] = ()
    """Further numbers of the rule."""

    def answer(self, finding: Finding, facts: MachineFacts) -> tuple[bool, str]:
        """Return whether the finding evicts its machine, and the reason."""
        if self.unless_shared and facts.is_shared(finding.reason):
            yes, count = False, facts.alike[finding.reason]
            because = f"{count} of {facts.machines} machines have {finding.reason} now: the cause is shared by them"
        elif self.decide:
            yes, because = self.decide(finding, facts)
        else:
            yes = self.evicts and finding.verdict is Health.FAULTY
            because = self.because.format(finding=finding)
        return yes, f"{finding.headline}: {because}" if because else finding.headline


def _from(source: FindingSource, owner: Owner | None = None, *, sure: bool = False) -> Callable[[Finding], bool]:
    """Return a function that matches the findings of one source.

    With ``owner`` it matches only faults of that owner, and with ``sure`` only sure findings.
    """

    def fits(finding: Finding) -> bool:
        faulty = owner is None or (finding.verdict is Health.FAULTY and finding.owner is owner)
        return finding.source is source and faulty and (finding.sure or not sure)

    return fits


def _second_alert(finding: Finding, facts: MachineFacts) -> tuple[bool, str]:
    if finding.reason in REPEATED_FLAPS:
        return True, "one link went down twice"
    if other := second_alert(finding, facts.alerts):
        apart_s = abs(other.since_ns - finding.since_ns) / 1e9
        return True, f"{apart_s:.0f} s from another alert, {other.headline}"
    if facts.stopped and is_down_for_good(finding, facts.now_ns):
        return True, f"the link has been down for {(facts.now_ns - finding.since_ns) / 1e9:.0f} s, and the job stopped"
    return False, f"one network alert is tolerated, the second within {ALERTS_WITHIN_S:.0f} s evicts"


SHARED = (
    FixedNumber("shared_share", SHARED_SHARE, "A fault is shared if more than this share of the machines have it", ""),
    FixedNumber(
        "shared_machines",
        SHARED_MACHINES,
        "and if more than this number of machines have it, or both machines of a job of two",
        "",
    ),
)
"""The conditions under which a fault or an alert is shared, and not blamed on the machine."""
ALERTS = (
    FixedNumber("alerts_within_s", ALERTS_WITHIN_S, "Alerts within this time count together", "ByteRobust, figure 5"),
    FixedNumber("one_alert_s", ONE_ALERT_S, "Alerts that are closer than this count as one alert", ""),
    FixedNumber("down_for_good_s", DOWN_FOR_GOOD_S, "A link that is down for less than this may be a flap", ""),
)
"""The conditions under which alerts of a machine count together."""

RULES: tuple[EvictRule, ...] = (
    EvictRule(
        OPERATOR,
        "an operator evicts the machine: neither a mode nor the breaker prevents that",
        "",
        _from(FindingSource.OPERATOR),
    ),
    EvictRule(
        "sure-machine-fault",
        "an inspection names the machine for sure, and the fault is not shared: evict at once",
        "ByteRobust, figure 5, step 1",
        _from(FindingSource.INSPECTION, Owner.MACHINE, sure=True),
        "it names this machine for sure",
        unless_shared=True,
        fixed=SHARED,
    ),
    EvictRule(
        "repeated-network-alert",
        f"one network alert is tolerated; a second alert of the machine within {ALERTS_WITHIN_S:.0f} s evicts it, "
        "and so does a link that is still down when the ranks are stopped",
        "ByteRobust, figure 5; it tolerates a link that comes back",
        is_alert,
        unless_shared=True,
        decide=_second_alert,
        fixed=ALERTS + SHARED,
    ),
    EvictRule(
        GONE,
        "the agent and the ranks of the machine are silent, or its killed ranks are not gone",
        "the paper gives no heartbeat limit",
        _from(FindingSource.SILENCE),
        settings=("silence.evict_s", "stop.evict_s"),
    ),
    EvictRule(
        "failed-test",
        "a test of the machine, whose ranks are stopped, fails, and the fault is not shared",
        "ByteRobust, section 4.2: suspects of a diagnosis are evicted",
        _from(FindingSource.TEST, Owner.MACHINE),
        "a test of the machine, while its ranks were stopped",
        unless_shared=True,
        until_released=True,
        fixed=SHARED,
    ),
    EvictRule(
        "bad-link",
        "a test shows that the link between two machines does not work: one of the two leaves",
        "over-eviction: each of the two machines may work",
        _from(FindingSource.TEST, Owner.NETWORK),
        "over-eviction: one of the two machines leaves, since the job cannot run over that link",
        unless_shared=True,
        fixed=SHARED,
    ),
    EvictRule(
        "failed-replay",
        "a replay of the job fails, or computes other bits, in every group that has the machine",
        "ByteRobust, section 6, algorithm 1: the intersection is evicted",
        _from(FindingSource.REPLAY, Owner.MACHINE),
        "a replay of the job on groups of its machines",
        unless_shared=True,
        until_released=True,
        fixed=SHARED,
    ),
    EvictRule(
        "repeated-errors",
        f"ranks of the machine ended {REPEATS} times by errors of a machine or of the network, no other rank did, and "
        "tests found nothing",
        "the paper tests and replays; everstep does not park the job after that if a machine is free",
        _from(FindingSource.ERRORS),
        unless_shared=True,
        until_released=True,
        fixed=SHARED,
    ),
    EvictRule(
        "hang-culprit",
        "the job hung, and samples of all ranks show that the others wait for ranks of the machine",
        "the wait-for graph (docs/concepts/hangs.md); the paper over-evicts",
        _from(FindingSource.HANG, Owner.MACHINE, sure=True),
        waits=False,
    ),
    EvictRule(
        "hang-group",
        "over-eviction: the job hung, and the machine is in the smallest parallel group that has all outliers",
        "ByteRobust, section 5.1, figure 7",
        _from(FindingSource.HANG),
        waits=False,
    ),
    EvictRule(
        "slow-machine",
        "the job became slow, a vote over samples of all ranks names the machine, and its ranks' own past agrees",
        "ByteRobust, section 5.1: five rounds; the machine with the most flags",
        _from(FindingSource.VOTE),
    ),
    EvictRule(
        "application-caused",
        "a fault of the job's code or data evicts no machine",
        "ByteRobust, section 4.1: rollback, not eviction",
        lambda finding: finding.owner in OF_THE_JOB,
        "owner {finding.owner}: a fault of the job evicts no machine",
        evicts=False,
    ),
    EvictRule(
        "unknown-verdict",
        "a machine that could not be inspected is not evicted for that",
        "",
        lambda finding: finding.verdict is not Health.FAULTY,
        "the verdict is {finding.verdict}, not faulty",
        evicts=False,
    ),
    EvictRule(
        "unsure-fault",
        "a fault that does not name the machine for sure has to be confirmed by a test",
        "ByteRobust, figure 5, step 3: stop-time checks",
        lambda finding: finding.owner is Owner.MACHINE,
        "it does not name the machine for sure: a test has to confirm it",
        evicts=False,
    ),
    EvictRule(
        "other-owner",
        "a fault of storage, of the scheduler or of an unknown owner: another machine would have it too",
        "",
        lambda finding: True,
        "owner {finding.owner}: another machine would have this fault too",
        evicts=False,
    ),
)
"""The rules in order. The first rule that fits a finding answers it. If several rules evict a machine, the first of
them is named as the reason."""
BY_NAME = {rule.name: rule for rule in RULES}
BY_TEST_OR_REPLAY = frozenset({"failed-test", "bad-link", "failed-replay"})
"""Rules that evict a machine because of a test or a replay, which the incident made while the job was stopped."""


def rule_of(finding: Finding) -> EvictRule:
    """Return the rule that answers a finding."""
    return next(rule for rule in RULES if rule.fits(finding))


def waits_for_another(name: str) -> bool:
    """Return whether the job waits for another machine if this rule evicts one."""
    return name not in BY_NAME or BY_NAME[name].waits


def mode_of(rule: EvictRule, policy: RecoveryPolicy) -> EvictMode:
    """Return how far a rule may go: its own mode, but never further than ``evict.mode``.

    An unknown mode counts as ``approve``. An operator's own request is always followed.
    """
    if rule.name == OPERATOR:
        return EvictMode.ACT
    order = (EvictMode.ACT, EvictMode.APPROVE, EvictMode.SHADOW, EvictMode.OFF)
    modes = policy.evict.mode, policy.evict.rules.get(rule.name, rule.mode)
    return max((mode if mode in order else EvictMode.APPROVE for mode in modes), key=order.index)
