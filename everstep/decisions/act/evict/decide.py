"""Which machines of a job are evicted now: one pure decision, from facts to a plan."""

from __future__ import annotations

from dataclasses import dataclass, field

from everstep.decisions.act.evict.facts import EvictFacts, each_machine
from everstep.decisions.act.evict.rules import OPERATOR, RULES, mode_of
from everstep.model.eviction import BREAKER, EvictAnswer, Eviction, EvictMode
from everstep.model.recovery_policy import RecoveryPolicy

ASKED_KEPT = 200
"""Answers of one decision that are kept, at most: those that say yes first."""
WHY_CHARACTERS = 300
"""Of one answer."""


@dataclass(frozen=True, slots=True)
class EvictPlan:
    """What the rules say together. A machine is in one of the lists at most; each has the order of the job."""

    evict: list[Eviction] = field(default_factory=list)
    ask: list[Eviction] = field(default_factory=list)
    """An operator has to approve: the mode of the rule, or the breaker, wants that."""
    shadow: list[Eviction] = field(default_factory=list)
    """Nothing is done about these; a rule in shadow mode would."""
    asked: list[EvictAnswer] = field(default_factory=list)
    """Every answer, "no" included."""
    tripped: str = ""
    """Why the breaker has an operator asked; empty: it does not."""


def decide(facts: EvictFacts, policy: RecoveryPolicy) -> EvictPlan:
    """Ask every rule about every machine of which something is known, then the breaker.

    Where rules of different modes say yes of one machine, the one that may go
    furthest counts, the first of these.
    """
    asked: list[EvictAnswer] = []
    by_mode: dict[EvictMode, list[Eviction]] = {mode: [] for mode in EvictMode}
    rules = [(rule, mode) for rule in RULES if (mode := mode_of(rule, policy)) is not EvictMode.OFF]
    for seen in each_machine(facts):
        answers = [
            EvictAnswer(
                rule=rule.name, machine=seen.machine, yes=said.yes, why=_cut(said.why), mode=mode, reason=said.reason
            )
            for rule, mode in rules
            for said in rule.judge(seen, policy)
        ]
        asked += answers
        for mode in (EvictMode.ACT, EvictMode.APPROVE, EvictMode.SHADOW):
            if first := next((answer for answer in answers if answer.yes and answer.mode is mode), None):
                one = Eviction(machine=first.machine, rule=first.rule, reason=first.reason, why=first.why)
                by_mode[mode].append(one)
                break
    evict, ask = by_mode[EvictMode.ACT], by_mode[EvictMode.APPROVE]
    said = [one for one in evict if one.rule == OPERATOR]
    tripped = trips(len(evict) - len(said), facts, policy)
    if tripped:
        asked.append(EvictAnswer(rule=BREAKER, machine="", yes=False, why=tripped))
        waiting = {one.machine: one for one in (*evict, *ask) if one not in said}
        evict, ask = said, [waiting[machine] for machine in facts.machines if machine in waiting]
    return EvictPlan(evict, ask, by_mode[EvictMode.SHADOW], _kept(asked), tripped)


def allowed(machines: int, policy: RecoveryPolicy) -> int:
    """How many machines of a job may be evicted within the window without an operator."""
    return max(policy.evict_at_least, int(policy.evict_share * machines + 1e-9))


def trips(wanted: int, facts: EvictFacts, policy: RecoveryPolicy) -> str:
    """Why an operator has to approve what the rules want; empty: it may be done.

    All or none of the machines: to evict some of them brings back no job that
    cannot go on without the others, and so many faults at once may be none of theirs.
    """
    began_ns = facts.now_ns - policy.evict_window_h * 3600e9
    before = sum(time_ns > began_ns for time_ns in facts.evicted_ns)
    most = allowed(len(facts.machines), policy)
    if not wanted or before + wanted <= most:
        return ""
    return (
        f"{wanted} machines of {len(facts.machines)} would be evicted, {before} were within the last "
        f"{policy.evict_window_h:g} h, and {most} may be without an operator's approval"
    )


def _kept(asked: list[EvictAnswer]) -> list[EvictAnswer]:
    """The answers in their order; where there are too many, those that say no go first, the last of them first."""
    if len(asked) <= ASKED_KEPT:
        return asked
    by_weight = sorted(range(len(asked)), key=lambda place: not (asked[place].yes or asked[place].rule == BREAKER))
    return [asked[place] for place in sorted(by_weight[:ASKED_KEPT])]


def _cut(text: str) -> str:
    return text if len(text) <= WHY_CHARACTERS else text[: WHY_CHARACTERS - 2] + " …"
