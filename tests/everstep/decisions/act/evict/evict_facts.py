"""Machines and findings for the tests of the eviction rules."""

from __future__ import annotations

from typing import Any

from everstep.decisions.act.evict.plan_evictions import EvictFacts, EvictPlan, plan_evictions
from everstep.decisions.blame.silence import findings_of_silence
from everstep.model.finding import Finding, Health, MachineFinding, Owner
from everstep.model.recovery_policy import RecoveryPolicy

S = 10**9
NOW = 10_000 * S
EIGHT = tuple(f"m{number}" for number in range(8))


def found(machine: str, reason: str = "gpu-lost", *, ago_s: float = 1.0, **fields: Any) -> MachineFinding:
    """Return a finding of a fault whose machine is certain, unless the fields change that."""
    fields = {"inspection": "test", "sure": True} | fields
    return MachineFinding(machine=machine, finding=Finding(reason=reason, since_ns=NOW - round(ago_s * S), **fields))


def flap(machine: str, item: str = "eth0", *, ago_s: float = 1.0) -> MachineFinding:
    """Return a finding of a link that went down and up again."""
    fields: dict[str, Any] = {"owner": Owner.NETWORK, "verdict": Health.UNKNOWN, "sure": False}
    return found(machine, "nic-flap", item=item, ago_s=ago_s, inspection="link", **fields)


def link_down(machine: str, item: str = "eth0", *, ago_s: float = 1.0) -> MachineFinding:
    """Return a finding of a link that is down."""
    return found(machine, "nic-down", item=item, ago_s=ago_s, inspection="link", owner=Owner.NETWORK, sure=False)


def silent(**seconds: float) -> list[MachineFinding]:
    """Return findings about silent machines. Each machine is given with its silence in seconds."""
    return findings_of_silence(seconds, RecoveryPolicy())


def plan(*findings: MachineFinding, policy: RecoveryPolicy | None = None, **fields: Any) -> EvictPlan:
    """Return the plan for a job of eight machines."""
    known: dict[str, Any] = {"now_ns": NOW, "machines": EIGHT, "findings": findings}
    facts = EvictFacts(**(known | fields))
    return plan_evictions(facts, policy or RecoveryPolicy())


def evicted(plan: EvictPlan) -> list[tuple[str, str]]:
    """Return the evicted machines, each with the rule that evicts it."""
    return [(eviction.machine, eviction.rule) for eviction in plan.evict]
