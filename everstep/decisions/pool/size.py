"""Computes the number of standbys that a cluster should have, with the reason.

The size is the larger result of two rules. The paper's rule is a quantile of the binomial distribution, by the number
of machines and the failure rate (ByteRobust, table 5). It assumes that failures are independent, and that repairs end
within a day. Our rule computes how many standbys the recorded failures of this cluster would have used. So it includes
bursts of failures, failures during the repair of other machines, and failures of repaired machines.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from everstep.decisions.pool.demand import FailureRecord, Refill, daily_demand

PAPER_RATE = 0.0012
"""The failures of one machine in a day, derived from the pool sizes in table 5 of ByteRobust."""
PAPER_MACHINE_DAYS = 1 / PAPER_RATE
"""The paper's rate is added to a record as one failure in this many machine-days. So a short record changes the paper's
rate little, and a long record replaces it."""


@dataclass(frozen=True, slots=True)
class FailureRate:
    """The failures of one machine in a day, and the source of the number."""

    per_day: float
    source: Literal["paper", "record", "given"]
    """``paper``: there is no record; ``record``: the failures of this cluster; ``given``: the rate was set."""
    failures: int = 0
    machine_days: float = 0.0


def failure_rate(record: FailureRecord | None) -> FailureRate:
    """Return the failure rate of a cluster; ``record`` has its past failures, None if they are not known."""
    machine_days = record.machines * record.days if record else 0.0
    if record is None or machine_days <= 0:
        return FailureRate(PAPER_RATE, "paper")
    failures = len(record.failures)
    per_day = min(1.0, (failures + 1) / (machine_days + PAPER_MACHINE_DAYS))
    return FailureRate(per_day, "record", failures, machine_days)


SHARE = 0.99
"""The share of days on which the standbys are to be enough (ByteRobust, table 5)."""
FLOOR = 1
"""The smallest number of standbys, unless another floor is set."""
WINDOW_DAYS = 180
"""The number of past days that our rule uses; older failures say little about the machines of today."""
SHORT_DAYS = 7
"""A record of fewer days than this shows nothing about peaks."""
MARGIN = 1.5
"""Our rule adds the square root of the peak, multiplied by this number, since the next peak is often higher than all
before. On the InfiniteHBD trace with a pool that is filled daily, the standbys were enough on 98.0 % of the days
without a margin, on 99.1 % with a factor of 1, and on 99.7 % with 1.5."""


@dataclass(frozen=True, slots=True)
class RecordSize:
    """The result of our rule for a record."""

    days: int
    """The number of days that the rule used."""
    peak: float
    """The number of standbys that would have been enough on 99 % of these days, scaled to the number of machines."""
    margin: int
    standbys: int
    """The peak and the margin together."""


@dataclass(frozen=True, slots=True)
class PoolSize:
    """The number of standbys that a cluster should have, with all its inputs."""

    machines: int
    standbys: int
    decided_by: Literal["floor", "binomial", "record"]
    """The rule that decided: the floor, the paper's rule, or ours."""
    floor: int
    refill: Refill
    rate: FailureRate
    binomial: int
    """The result of the paper's rule."""
    record: RecordSize | None
    """The result of our rule; None: the record is too short."""
    recorded_machines: int
    """The number of machines of the record; other clusters need standbys in proportion. 0: there is no record."""


def pool_size(
    machines: int,
    record: FailureRecord | None,
    *,
    refill: Refill = Refill.REPAIR,
    floor: int = FLOOR,
    rate: FailureRate | None = None,
) -> PoolSize:
    """Return how many standbys a cluster should have.

    Args:
        machines: The number of machines that may fail.
        record: The failures of the past; None: none are known.
        refill: The source of the machines that refill the pool.
        floor: The smallest number of standbys.
        rate: The failure rate for the paper's rule; None: the rate of the record.
    """
    rate = rate or failure_rate(record)
    binomial = binomial_quantile(machines, rate.per_day)
    own = record_size(record, machines, refill) if record else None
    answers: list[tuple[int, Literal["floor", "binomial", "record"]]] = [(floor, "floor"), (binomial, "binomial")]
    if own:
        answers.append((own.standbys, "record"))
    standbys, decided_by = max(answers, key=lambda answer: answer[0])
    recorded = record.machines if record else 0
    return PoolSize(machines, standbys, decided_by, floor, refill, rate, binomial, own, recorded)


def record_size(record: FailureRecord, machines: int, refill: Refill) -> RecordSize | None:
    """Return the result of our rule: the standbys that were enough on 99 % of the last days, and a margin.

    Args:
        record: The failures of the past.
        machines: The number of machines that may fail.
        refill: The source of the machines that refill the pool.

    Returns:
        None if the record is too short.
    """
    peaks = daily_demand(record, refill)[-WINDOW_DAYS:]
    if len(peaks) < SHORT_DAYS or record.machines < 1:
        return None
    peak = sorted(peaks)[math.ceil(SHARE * len(peaks)) - 1] * machines / record.machines
    margin = math.ceil(MARGIN * math.sqrt(peak))
    return RecordSize(len(peaks), peak, margin, min(machines, math.ceil(peak) + margin))


def binomial_quantile(machines: int, rate: float, share: float = SHARE) -> int:
    """Return the smallest number that the count of failures does not exceed with the required probability.

    Args:
        machines: The number of machines, which fail independently.
        rate: The probability that a machine fails.
        share: The required probability.
    """
    if machines < 1 or rate <= 0:
        return 0
    if rate >= 1:
        return machines
    mean = machines * rate
    # The probability of lower counts is below 1e-20. From this count on, the probabilities do not round to 0.
    count = max(0, math.floor(mean - 12 * math.sqrt(mean * (1 - rate)) - 12))
    ways = math.lgamma(machines + 1) - math.lgamma(count + 1) - math.lgamma(machines - count + 1)
    probability = math.exp(ways + count * math.log(rate) + (machines - count) * math.log1p(-rate))
    total = probability
    while total < share and count < machines:
        probability *= (machines - count) / (count + 1) * rate / (1 - rate)
        count += 1
        total += probability
    return count


@dataclass(frozen=True, slots=True)
class RuleResult:
    """The result and the cost of a rule on a record."""

    rule: Literal["binomial", "record"]
    """``binomial``: the paper's rule alone; ``record``: the larger result of both rules."""
    refill: Refill
    days: int
    held: int
    """The number of days on which the standbys were enough at every moment."""
    mean_standbys: float
    mean_idle: float
    """The mean number of standbys that were not needed on a day."""

    @property
    def share(self) -> float:
        """The share of the days on which the standbys were enough."""
        return self.held / self.days if self.days else 0.0


def walk_forward(record: FailureRecord, refill: Refill, *, floor: int = FLOOR) -> tuple[RuleResult, RuleResult]:
    """Return the results of the paper's rule and of both rules, if they had chosen the standbys of each day.

    For each day the rules know only the failures before it.

    Args:
        record: The failures of the past.
        refill: The source of the machines that refill the pool.
        floor: The smallest number of standbys.
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
