"""Plans evictions: all findings about the machines of a job decide which machines leave it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from everstep.base.text import cut
from everstep.decisions.act.evict.rules import GONE, OPERATOR, RULES, MachineFacts, mode_of, rule_of
from everstep.decisions.act.evict.shared import alike_machines
from everstep.decisions.blame.alerts import alerts_of
from everstep.model.eviction import BREAKER, STANDBY_UNFIT, EvictAnswer, Eviction, EvictMode
from everstep.model.finding import Finding, Health, MachineFinding, worst_first
from everstep.model.recovery_policy import RecoveryPolicy

ASKED_KEPT = 200
"""The largest number of answers of one decision that are kept; answers that evict come first."""
WHY_CHARACTERS = 300
"""The number of characters after which an answer's text is cut."""


@dataclass(frozen=True, slots=True)
class EvictFacts:
    """The facts about the machines of one job at the moment of the decision. The order of findings has no meaning."""

    now_ns: int
    machines: Sequence[str]
    """The machines of the job, in order."""
    findings: Sequence[MachineFinding] = ()
    """The active findings about the machines, from every source."""
    alike: Mapping[str, int] = field(default_factory=dict)
    """Reason code → the number of machines with such a fault, if ``findings`` leaves some of them out."""
    earlier: Sequence[MachineFinding] = ()
    """Earlier network alerts; ``since_ns`` is their time."""
    evicted_ns: Sequence[int] = ()
    """Times of earlier evictions from this job that count (:func:`counts`): one entry for each machine."""
    stopped: bool = True
    """Whether the ranks are stopped; False: they continue, and a machine leaves only if it must."""


@dataclass(frozen=True, slots=True)
class EvictPlan:
    """The combined answer of all rules.

    Each machine is in at most one of the lists ``evict``, ``ask`` and ``shadow``. Each list is in the order of the
    job's machines.
    """

    evict: list[Eviction] = field(default_factory=list)
    ask: list[Eviction] = field(default_factory=list)
    """Evictions that an operator has to approve, because of the mode of the rule or because of the breaker."""
    shadow: list[Eviction] = field(default_factory=list)
    """Evictions by rules in shadow mode, which are only noted."""
    asked: list[EvictAnswer] = field(default_factory=list)
    """All answers, including every "no"."""

    @property
    def tripped(self) -> str:
        """Why the breaker asks an operator; empty: it does not ask."""
        return next((answer.why for answer in self.asked if answer.rule == BREAKER), "")

    def without(self, machines: Collection[str]) -> EvictPlan:
        """Return the plan without machines that stay in the job by an operator's decision."""
        evict = [eviction for eviction in self.evict if eviction.machine not in machines]
        return replace(self, evict=evict, ask=[eviction for eviction in self.ask if eviction.machine not in machines])


def plan_evictions(facts: EvictFacts, policy: RecoveryPolicy) -> EvictPlan:
    """Answer every finding about a machine of the job, then ask the breaker.

    If rules of different modes evict the same machine, the strongest mode counts: ``act``, then ``approve``, then
    ``shadow``. Among rules of the same mode the first one counts.
    """
    asked: list[EvictAnswer] = []
    by_mode: dict[EvictMode, list[Eviction]] = {mode: [] for mode in EvictMode}
    modes = {rule.name: mode_of(rule, policy) for rule in RULES}
    for machine in _each_machine(facts):
        answers = list(_answers(machine, modes))
        asked += answers
        for mode in (EvictMode.ACT, EvictMode.APPROVE, EvictMode.SHADOW):
            if first := next((answer for answer in answers if answer.yes and answer.mode is mode), None):
                by_mode[mode].append(
                    Eviction(machine=first.machine, rule=first.rule, reason=first.reason, why=first.why)
                )
                break
    evict, ask = by_mode[EvictMode.ACT], by_mode[EvictMode.APPROVE]
    ordered = [eviction for eviction in evict if eviction.rule == OPERATOR]
    if tripped := breaker(len(evict) - len(ordered), facts, policy):
        asked.append(tripped)
        waiting = {eviction.machine: eviction for eviction in (*evict, *ask) if eviction not in ordered}
        evict, ask = ordered, [waiting[machine] for machine in facts.machines if machine in waiting]
    return EvictPlan(evict, ask, by_mode[EvictMode.SHADOW], _kept(asked))


def allowed(machines: int, policy: RecoveryPolicy) -> int:
    """Return how many machines of a job may be evicted within the window without an operator."""
    return max(policy.evict.at_least, int(policy.evict.share * machines + 1e-9))


def counts(eviction: Eviction) -> bool:
    """Return whether an eviction counts for the breaker of later decisions.

    The breaker limits what a wrong rule can do. A machine that did not answer was lost whatever the rules say, an
    operator knows what he approved, and an unfit replacement is not a machine of the job.
    """
    return eviction.rule not in {OPERATOR, STANDBY_UNFIT, GONE} and not eviction.approved_by


def breaker(wanted: int, facts: EvictFacts, policy: RecoveryPolicy) -> EvictAnswer | None:
    """Return why an operator has to approve the evictions because there are too many; None: no approval is needed.

    The breaker holds back all of the machines or none of them. A job that needs several evictions cannot resume after
    only some of them, and many faults at once may have a cause outside the machines.
    """
    began_ns = facts.now_ns - policy.evict.window_h * 3600e9
    before = sum(time_ns > began_ns for time_ns in facts.evicted_ns)
    most = allowed(len(facts.machines), policy)
    if not wanted or before + wanted <= most:
        return None
    why = (
        f"{wanted} machines of {len(facts.machines)} would be evicted, {before} were evicted within the last "
        f"{policy.evict.window_h:g} h, and at most {most} may leave without an operator's approval"
    )
    return EvictAnswer(rule=BREAKER, machine="", yes=False, why=why)


def _answers(machine: MachineFacts, modes: Mapping[str, EvictMode]) -> Iterator[EvictAnswer]:
    """Return the answers to all findings about one machine, rule by rule; ``modes`` says how far each rule may go."""
    by_rule: dict[str, list[Finding]] = defaultdict(list)
    for finding in machine.findings:
        by_rule[rule_of(finding).name].append(finding)
    for rule in RULES:
        if (mode := modes[rule.name]) is EvictMode.OFF:
            continue
        for finding in by_rule[rule.name]:
            yes, why = rule.answer(finding, machine)
            yield EvictAnswer(
                rule=rule.name,
                machine=machine.machine,
                yes=yes,
                why=cut(why, WHY_CHARACTERS),
                mode=mode,
                reason=finding.reason,
            )


def _each_machine(facts: EvictFacts) -> Iterator[MachineFacts]:
    """Return the facts of each machine with findings, in the order of the job's machines."""
    now, before = _by_machine(facts.findings), _by_machine(facts.earlier)
    machines = set(facts.machines)
    listed = alike_machines(about for about in facts.findings if about.machine in machines)
    alike = Counter(listed) | Counter(facts.alike)  # of each reason, the larger number
    for machine in facts.machines:
        if findings := now.get(machine):
            alerts = alerts_of([*findings, *before.get(machine, ())])
            yield MachineFacts(
                machine, tuple(findings), alerts, len(facts.machines), alike, facts.now_ns, facts.stopped
            )


def _by_machine(findings: Iterable[MachineFinding]) -> dict[str, list[Finding]]:
    """Return the findings of each machine, the worst first, without those that report a part as healthy."""
    by_machine: dict[str, list[Finding]] = defaultdict(list)
    for about in findings:
        if about.finding.verdict is not Health.HEALTHY:
            by_machine[about.machine].append(about.finding)
    return {
        machine: worst_first(sorted(own, key=lambda finding: (finding.text, finding.evidence)))
        for machine, own in by_machine.items()
    }


def _kept(asked: list[EvictAnswer]) -> list[EvictAnswer]:
    """Keep the answers in their order. If there are too many, answers that do not evict are dropped first, from the
    end; the breaker's answer is always kept."""
    if len(asked) <= ASKED_KEPT:
        return asked
    by_weight = sorted(range(len(asked)), key=lambda index: (asked[index].rule != BREAKER, not asked[index].yes))
    return [asked[index] for index in sorted(by_weight[:ASKED_KEPT])]
