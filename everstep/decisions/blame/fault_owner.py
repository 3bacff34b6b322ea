"""Whose matter an incident was, from all that it knows."""

from __future__ import annotations

from collections.abc import Sequence

from everstep.model.classification import Classification
from everstep.model.health import Health, MachineFinding
from everstep.model.owner import Owner


def fault_owner(classification: Classification | None, findings: Sequence[MachineFinding]) -> Owner:
    """What ended the first rank says it; where that is a consequence or says nothing, a fault that was found.

    Args:
        classification: Of the failure; None: no rank failed by itself.
        findings: Of the inspections, the worst first.
    """
    if classification is not None and not classification.consequence and classification.owner != Owner.UNKNOWN:
        return Owner(classification.owner)
    faults = (seen.finding.owner for seen in findings if seen.finding.verdict is Health.FAULTY)
    return next((owner for owner in faults if owner is not Owner.UNKNOWN), Owner.UNKNOWN)
