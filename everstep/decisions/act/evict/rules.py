"""The eviction rules, as one table: which findings evict their machine, and why other findings do not.

Every suspicion of a machine is a ``Finding``, from inspections, tests, replays, samples of a hang or of a slow job,
silence, or operators (``FindingSource``). Each finding is answered by one rule, the first row that it fits. The first
four rows are an operator's request and the evictions that figure 5 of ByteRobust makes without a test; then follow
results of tests while the job was stopped, hangs and slow machines. The last four rows evict no machine: they explain
why a finding is not enough. If no rule evicts, the ladder decides what is tried (``everstep.decisions.act.ladder``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from everstep.decisions.blame.alerts import ALERTS_WITHIN_S, ONE_ALERT_S, REPEATED_FLAPS, is_alert, second_alert
from everstep.model.eviction import EvictMode
from everstep.model.finding import Finding, FindingSource, Health, Owner
from everstep.model.recovery_policy import RecoveryPolicy

SHARED_MACHINES = 2
"""A fault that more machines than these have at the same time may be shared."""
SHARED_SHARE = 0.5
"""A fault is shared if more than this share of the job's machines have it."""
OPERATOR = "operator"
"""Name of the rule that an operator's word is enough for."""
OF_THE_JOB = frozenset({Owner.CODE, Owner.DATA})


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """The facts about one machine of a job at one moment."""

    machine: str
    findings: tuple[Finding, ...]
    """All that speaks against it now, the worst first."""
    alerts: tuple[Finding, ...]
    """The machine's network alerts, active and earlier, the oldest first; each alert once."""
    machines: int
    """The number of machines of the job."""
    alike: Mapping[str, int]
    """Reason code → how many machines of the job have such a fault now."""


@dataclass(frozen=True, slots=True)
class FixedNumber:
    """A number that a rule uses and that no setting changes."""

    name: str
    value: float
    says: str
    source: str


@dataclass(frozen=True, slots=True)
class EvictRule:
    """One row: the findings that the rule answers, and its answer."""

    name: str
    """The stable name of the rule in reports, settings and metrics."""
    asks: str
    """The question that the rule answers, in one line."""
    paper: str
    """The source of the rule."""
    fits: Callable[[Finding], bool]
    because: str = ""
    """The text that the answer adds to the finding's own text, as a format of ``finding``."""
    evicts: bool = True
    """A finding that it fits, and whose verdict is faulty, has its machine evicted; False: it only says why not."""
    unless_shared: bool = False
    """A fault that more than half of the machines have is none of theirs."""
    decide: Callable[[Finding, MachineFacts], tuple[bool, str]] | None = None
    """A function that decides, and adds to the finding's text, if the decision needs more than the finding."""
    waits: bool = True
    """The job waits for another machine where there is none; False: then it is tried again with this one, since the
    fault may have been the software's."""
    until_released: bool = False
    """Only a test or a replay sees the fault: the pool keeps the machine until an operator releases it."""
    mode: EvictMode = EvictMode.ACT
    """How far the rule may go, unless the policy of the job sets another mode."""
    settings: tuple[str, ...] = ()
    """Settings of the policy that it depends on."""
    fixed: tuple[FixedNumber, ...] = ()
    """Further numbers of the rule."""

    def answer(self, finding: Finding, facts: MachineFacts) -> tuple[bool, str]:
        """Return whether the finding evicts its machine, and the reason."""
        shared = self.unless_shared and is_shared(finding.reason, facts)
        if shared:
            count = facts.alike[finding.reason]
            yes, because = (
                False,
                (
                    f"{count} of {facts.machines} machines have {finding.reason} now: what they share is at fault, "
                    "not each of them"
                ),
            )
        elif self.decide:
            yes, because = self.decide(finding, facts)
        else:
            yes = self.evicts and finding.verdict is Health.FAULTY
            because = self.because.format(finding=finding)
        return yes, f"{finding.headline}: {because}" if because else finding.headline


def is_shared(reason: str, facts: MachineFacts) -> bool:
    """Return whether the number of machines with the same fault is too large to blame this machine alone."""
    count = facts.alike.get(reason, 0)
    return count > SHARED_MACHINES and count > SHARED_SHARE * facts.machines


def _from(source: FindingSource, owner: Owner | None = None, *, sure: bool = False) -> Callable[[Finding], bool]:
    """Match findings of one source: all of them, or faults of one owner only; ``sure``: sure findings only."""

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
    return False, f"one network alert is tolerated, the second within {ALERTS_WITHIN_S:.0f} s evicts"


SHARED = (
    FixedNumber("shared_share", SHARED_SHARE, "More than this share of the machines have it now: it is shared", ""),
    FixedNumber("shared_machines", SHARED_MACHINES, "And more machines than these have it", ""),
)
"""The conditions under which a fault or an alert is not blamed on the machine."""
ALERTS = (
    FixedNumber("alerts_within_s", ALERTS_WITHIN_S, "Two alerts within this count together", "ByteRobust, figure 5"),
    FixedNumber("one_alert_s", ONE_ALERT_S, "Two alerts that are closer than this are one", ""),
)
"""The conditions under which alerts of a machine count together."""

RULES: tuple[EvictRule, ...] = (
    EvictRule(
        OPERATOR,
        "an operator takes the machine out: neither a mode nor the breaker holds that up",
        "",
        _from(FindingSource.OPERATOR),
    ),
    EvictRule(
        "sure-machine-fault",
        "a fault that names the machine for sure, and that the machines do not share: evict at once",
        "ByteRobust, figure 5, step 1",
        _from(FindingSource.INSPECTION, Owner.MACHINE, sure=True),
        "it names this machine for sure",
        unless_shared=True,
        fixed=SHARED,
    ),
    EvictRule(
        "repeated-network-alert",
        f"one network alert is tolerated, the second of a machine within {ALERTS_WITHIN_S:.0f} s evicts",
        "ByteRobust, figure 5",
        is_alert,
        unless_shared=True,
        decide=_second_alert,
        fixed=ALERTS + SHARED,
    ),
    EvictRule(
        "gone-machine",
        "agent and ranks of the machine are silent",
        "the paper gives no heartbeat limit",
        _from(FindingSource.SILENCE),
        settings=("silence.evict_s",),
    ),
    EvictRule(
        "failed-test",
        "a test of the machine, whose ranks are stopped, finds it at fault, and the machines do not share that",
        "ByteRobust, section 4.2: suspects of a diagnosis are evicted",
        _from(FindingSource.TEST, Owner.MACHINE),
        "a test of the stopped machine says so",
        unless_shared=True,
        until_released=True,
        fixed=SHARED,
    ),
    EvictRule(
        "bad-link",
        "a test of the stopped machines finds that the link between two of them does not work: one of them leaves",
        "each of the two may work, so this is over-eviction",
        _from(FindingSource.TEST, Owner.NETWORK),
        "over-eviction: one of the two leaves, since the job cannot run over that link",
        unless_shared=True,
        fixed=SHARED,
    ),
    EvictRule(
        "failed-replay",
        "the job's script, run on groups of the stopped machines, breaks or computes other bits where this one is in",
        "ByteRobust, section 6, algorithm 1: the intersection is evicted",
        _from(FindingSource.REPLAY, Owner.MACHINE),
        "a replay of the job says so",
        unless_shared=True,
        until_released=True,
        fixed=SHARED,
    ),
    EvictRule(
        "hang-culprit",
        "the job hung, and samples of all ranks name this machine's, for which the others wait",
        "the wait-for graph (docs/concepts/hangs.md); the paper over-evicts",
        _from(FindingSource.HANG, Owner.MACHINE, sure=True),
        waits=False,
    ),
    EvictRule(
        "hang-group",
        "the job hung, and the machine is of the smallest parallel group that the outliers share: over-eviction",
        "ByteRobust, section 5.1, figure 7",
        _from(FindingSource.HANG),
        waits=False,
    ),
    EvictRule(
        "slow-machine",
        "the job became slow, a vote over samples of all ranks names this machine, and its ranks' own past agrees",
        "ByteRobust, section 5.1: five rounds, the one with most flags",
        _from(FindingSource.VOTE),
    ),
    EvictRule(
        "application-caused",
        "code and data of a job evict no machine: that takes more than one job's own evidence",
        "ByteRobust, section 4.1: rollback, not eviction",
        lambda finding: finding.owner in OF_THE_JOB,
        "owner {finding.owner}: the evidence of one job alone evicts no machine",
        evicts=False,
    ),
    EvictRule(
        "unknown-verdict",
        "what could not be inspected is no fault",
        "",
        lambda finding: finding.verdict is not Health.FAULTY,
        "the verdict is {finding.verdict}, and that is no fault",
        evicts=False,
    ),
    EvictRule(
        "unsure-fault",
        "a fault that does not name the machine for sure waits for a test",
        "ByteRobust, figure 5, step 3: stop-time checks",
        lambda finding: finding.owner is Owner.MACHINE,
        "it does not name the machine for sure; a test has to",
        evicts=False,
    ),
    EvictRule(
        "other-owner",
        "storage, scheduler and unknown owners: another machine has the same fault",
        "",
        lambda finding: True,
        "owner {finding.owner}, so not this machine alone",
        evicts=False,
    ),
)
"""The rules in order: the first rule that fits a finding answers it; if several evict a machine, the first is named."""
BY_NAME = {rule.name: rule for rule in RULES}
BY_TEST_OR_REPLAY = frozenset({"failed-test", "bad-link", "failed-replay"})
"""Rules that act on what an incident looked for while the job was stopped."""


def rule_of(finding: Finding) -> EvictRule:
    """The rule that answers a finding."""
    return next(rule for rule in RULES if rule.fits(finding))


def waits_for_another(name: str) -> bool:
    """Return whether the job waits for another machine if this rule evicts one."""
    return name not in BY_NAME or BY_NAME[name].waits


def mode_of(rule: EvictRule, policy: RecoveryPolicy) -> EvictMode:
    """Return how far a rule may go: its own mode, but never further than ``evict.mode``.

    An unknown mode asks an operator. An operator's own request is always followed.
    """
    if rule.name == OPERATOR:
        return EvictMode.ACT
    order = (EvictMode.ACT, EvictMode.APPROVE, EvictMode.SHADOW, EvictMode.OFF)
    known = [
        mode if mode in order else EvictMode.APPROVE
        for mode in (policy.evict.mode, policy.evict.rules.get(rule.name, rule.mode))
    ]
    return max(known, key=order.index)
