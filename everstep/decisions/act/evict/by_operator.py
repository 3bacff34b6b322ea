"""An operator says that a machine is to leave its job: it is told like a fault that was found, and needs no rule."""

from __future__ import annotations

from everstep.model.health import Finding, Health, MachineFinding, Remedy
from everstep.model.incident import Anomaly, Symptom
from everstep.model.owner import Owner
from everstep.model.pool import OperatorMove

REASON = "operator-evict"
"""Reason code of such an eviction."""


def operator_anomaly(move: OperatorMove, generation: int, now_ns: int) -> Anomaly:
    """What the job does something about."""
    finding = Finding(
        inspection="operator",
        reason=REASON,
        verdict=Health.FAULTY,
        text=f"{move.operator} takes it out" + (f": {move.reason}" if move.reason else ""),
        owner=Owner.MACHINE,
        remedy=Remedy.NOTHING,
        sure=True,
        since_ns=now_ns,
    )
    found = MachineFinding(machine=move.machine, finding=finding)
    return Anomaly(
        id=f"{REASON}-{move.machine}-{now_ns}",
        generation=generation,
        symptom=Symptom.MACHINE_FAULT,
        headline=found.headline,
        machines=[move.machine],
        seen_ns=now_ns,
        findings=[found],
    )


def by_operator(found: Finding) -> bool:
    """Whether a finding is what an operator said."""
    return found.reason == REASON and found.inspection == "operator"
