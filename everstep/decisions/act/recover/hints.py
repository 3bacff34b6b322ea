"""Findings of inspections that explain a failure, and do not name their machine for sure."""

from __future__ import annotations

from everstep.model.finding import Finding, Health, Owner


def is_hint(finding: Finding) -> bool:
    """Whether a test has to say if the machine is at fault, as the rule ``unsure-fault`` has it."""
    return finding.verdict is Health.FAULTY and finding.owner is Owner.MACHINE and not finding.sure
