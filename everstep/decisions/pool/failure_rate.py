"""How often a machine fails in a day, from what was seen, and from a paper where little was."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from everstep.decisions.pool.demand import FailureRecord

PAPER_RATE = 0.0012
"""Failures of one machine in a day: the rate that gives the pool sizes of ByteRobust, table 5 (derived)."""
PAPER_MACHINE_DAYS = 1 / PAPER_RATE
"""The paper's rate counts as one failure in so many machine-days: what a short record says, or one without a
failure, changes it little; a long one replaces it."""


@dataclass(frozen=True, slots=True)
class FailureRate:
    """Failures of one machine in a day, and where the number comes from."""

    per_day: float
    source: Literal["paper", "record", "given"]
    """``paper``: nothing was seen here; ``given``: somebody says so."""
    failures: int = 0
    machine_days: float = 0.0


def failure_rate(record: FailureRecord | None) -> FailureRate:
    """The failure rate of a cluster.

    Args:
        record: What is known of its failures; None: nothing.
    """
    machine_days = record.machines * record.days if record else 0.0
    if record is None or machine_days <= 0:
        return FailureRate(PAPER_RATE, "paper")
    failures = len(record.failures)
    per_day = min(1.0, (failures + 1) / (machine_days + PAPER_MACHINE_DAYS))
    return FailureRate(per_day, "record", failures, machine_days)
