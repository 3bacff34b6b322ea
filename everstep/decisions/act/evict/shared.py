"""Counts the machines that share a fault, and shortens the findings about them.

A fault of more than half of the machines has a cause outside of them and evicts none. So machines are counted before
any finding is left out, and no finding is left out that may evict its machine.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

from everstep.decisions.act.evict.rules import rule_of
from everstep.decisions.blame.shared_fault import is_shared
from everstep.model.finding import Health, MachineFinding, worst_first

WHOLE = 64
"""The number of findings that are kept with their evidence, of about 500 bytes each."""
OF_A_MACHINE = 4
"""The number of findings about one machine that are kept beside them, without their evidence."""


def alike_machines(findings: Iterable[MachineFinding]) -> dict[str, int]:
    """Return reason code → the number of machines with such a fault, for the faults that evict no machine if they are
    shared."""
    having: dict[str, set[str]] = defaultdict(set)
    for about in findings:
        if about.finding.verdict is not Health.HEALTHY and rule_of(about.finding).unless_shared:
            having[about.finding.reason].add(about.machine)
    return {reason: len(machines) for reason, machines in sorted(having.items())}


def kept_findings(findings: Iterable[MachineFinding], alike: Mapping[str, int], machines: int) -> list[MachineFinding]:
    """Return the findings that decisions need, the worst first.

    Every finding that may evict its machine is kept, also if its text is not. If there are very many findings, those
    that are shared, and those that evict no machine, are left out first.

    Args:
        findings: All findings, in any order.
        alike: The result of :func:`alike_machines` for them.
        machines: The number of machines of the job.
    """
    every = sorted(findings, key=lambda about: about.machine)
    place = {id(finding): position for position, finding in enumerate(worst_first(about.finding for about in every))}
    every.sort(key=lambda about: place[id(about.finding)])
    if len(every) <= WHOLE:
        return every
    may_evict = [_may_evict(about, alike, machines) for about in every]
    whole = {*sorted(range(len(every)), key=lambda number: not may_evict[number])[:WHOLE]}
    short: Counter[str] = Counter()
    kept = []
    for number, about in enumerate(every):
        if number in whole:
            kept.append(about)
        elif may_evict[number] and short[about.machine] < OF_A_MACHINE:
            short[about.machine] += 1
            kept.append(without_evidence(about))
    return kept


def without_evidence(about: MachineFinding) -> MachineFinding:
    """Return a finding without the lines that show it."""
    return about.model_copy(update={"finding": about.finding.model_copy(update={"text": "", "evidence": []})})


def _may_evict(about: MachineFinding, alike: Mapping[str, int], machines: int) -> bool:
    rule = rule_of(about.finding)
    return (rule.evicts or rule.decide is not None) and not (
        rule.unless_shared and is_shared(alike.get(about.finding.reason, 0), machines)
    )
