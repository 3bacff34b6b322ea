"""What the rules for the size of the pool would have done on a record: each day is sized from the days before it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from everstep.decisions.pool.demand import FailureRecord, Refill, daily_demand
from everstep.decisions.pool.size import FLOOR, PoolSize, pool_size


@dataclass(frozen=True, slots=True)
class RuleResult:
    """How a rule would have done, and at what cost."""

    rule: Literal["binomial", "record"]
    """The paper's rule, or ours, which is never below it."""
    refill: Refill
    days: int
    held: int
    """Days on which the standbys were enough at every moment."""
    mean_standbys: float
    mean_idle: float
    """Standbys beyond the highest need of the day, on average."""

    @property
    def share(self) -> float:
        """Of the days on which the standbys were enough."""
        return self.held / self.days if self.days else 0.0


def walk_forward(record: FailureRecord, refill: Refill, *, floor: int = FLOOR) -> tuple[RuleResult, RuleResult]:
    """How the paper's rule and ours would have done on a record.

    Args:
        record: The failures of the past.
        refill: Where the machines come from that fill the pool again.
        floor: Never fewer standbys than this.
    """
    needed = daily_demand(record, refill)
    sizes = [pool_size(record.machines, record.before(day), refill=refill, floor=floor) for day in range(len(needed))]

    def result(rule: Literal["binomial", "record"]) -> RuleResult:
        standbys = [_standbys(size, rule) for size in sizes]
        both = list(zip(standbys, needed, strict=True))
        days = len(both)
        return RuleResult(
            rule=rule,
            refill=refill,
            days=days,
            held=sum(need <= had for had, need in both),
            mean_standbys=sum(standbys) / days if days else 0.0,
            mean_idle=sum(max(0, had - need) for had, need in both) / days if days else 0.0,
        )

    return result("binomial"), result("record")


def _standbys(size: PoolSize, rule: Literal["binomial", "record"]) -> int:
    return size.standbys if rule == "record" else max(size.floor, size.binomial)
