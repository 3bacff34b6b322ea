"""Computes by two rules how many standbys a cluster should have, and how well both rules would have done on recorded
failures."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from activities.ledger.ledger import Ledger
from activities.ledger.records import IncidentRecord
from everstep.decisions.pool.demand import FailureRecord, Refill, record_from
from everstep.decisions.pool.size import FLOOR, FailureRate, PoolSize, RuleResult, pool_size, walk_forward

Rule = Literal["binomial", "record"]


class RateReport(BaseModel):
    """The failure rate of one machine."""

    per_day: float
    source: Literal["paper", "record", "given"]
    failures: int
    machine_days: float


class RecordReport(BaseModel):
    """The recorded failures from which the number was computed."""

    source: str
    """The ledger or the file that has the failures."""
    machines: int
    days: float
    failures: int
    away: int
    """Number of failures after which the machine is not known to be back; it counts as away."""


class RuleReport(BaseModel):
    """The result of a rule, and how well it would have done on the record; None: there is no record."""

    rule: Rule
    """``binomial``: the rule of the paper (ByteRobust); ``record``: everstep's rule."""
    standbys: int | None
    """Number of standbys; None: the record is too short for this rule."""
    days: int | None = None
    """Number of days to which the rule was applied, each time with the failures of the days before."""
    held: int | None = None
    """Number of days on which the rule's number of standbys would always have been enough."""
    share: float | None = None
    """``held`` over ``days``, 0 to 1."""
    idle_machine_days: float | None = None
    """Number of standbys that a day did not need, summed over the days."""


class StandbyReport(BaseModel):
    """How many standbys a cluster should have; the JSON of ``everstep standbys``."""

    machines: int
    """Number of machines for jobs."""
    standbys: int
    decided_by: Literal["floor", "binomial", "record"]
    floor: int
    refill: Refill
    rate: RateReport
    record: RecordReport | None = None
    """The recorded failures; None: no failures are known."""
    peak: float | None = None
    """Standbys that would have been enough on 99 % of the last days, for this cluster's size; None: not known."""
    margin: int | None = None
    """Standbys that the rule ``record`` adds to ``peak``."""
    rules: list[RuleReport] = Field(default_factory=list)
    """The results of both rules; empty: this was not requested."""


def standby_report(
    machines: int,
    record: FailureRecord | None,
    source: str,
    *,
    rate: float | None = None,
    refill: Refill = Refill.REPAIR,
    explain: bool = False,
) -> StandbyReport:
    """How many standbys there should be.

    Args:
        machines: Number of machines for jobs.
        record: The failures of the past; None: none are known.
        source: Source of the record, as text.
        rate: Failures of one machine in a day; None: the rate of the record, or else the paper's.
        refill: Source of the machines that refill the pool.
        explain: Whether to apply both rules to the record too; this takes one second for a year of 400 machines.
    """
    given = None if rate is None else FailureRate(rate, "given")
    size = pool_size(machines, record, refill=refill, floor=FLOOR, rate=given)
    return StandbyReport(
        machines=machines,
        standbys=size.standbys,
        decided_by=size.decided_by,
        floor=size.floor,
        refill=refill,
        rate=RateReport(
            per_day=size.rate.per_day,
            source=size.rate.source,
            failures=size.rate.failures,
            machine_days=size.rate.machine_days,
        ),
        record=_recorded(record, source),
        peak=size.record.peak if size.record else None,
        margin=size.record.margin if size.record else None,
        rules=_rules(size, record, refill) if explain else [],
    )


def _recorded(record: FailureRecord | None, source: str) -> RecordReport | None:
    if record is None:
        return None
    away = sum(failure.back_day is None for failure in record.failures)
    return RecordReport(
        source=source, machines=record.machines, days=record.days, failures=len(record.failures), away=away
    )


def _rules(size: PoolSize, record: FailureRecord | None, refill: Refill) -> list[RuleReport]:
    own = size.record.standbys if size.record else None
    if record is None:
        return [RuleReport(rule="binomial", standbys=size.binomial), RuleReport(rule="record", standbys=own)]
    binomial, recorded = walk_forward(record, refill, floor=size.floor)
    return [_rule(binomial, size.binomial), _rule(recorded, own)]


def _rule(result: RuleResult, standbys: int | None) -> RuleReport:
    if not result.days or standbys is None:
        return RuleReport(rule=result.rule, standbys=standbys)
    return RuleReport(
        rule=result.rule,
        standbys=standbys,
        days=result.days,
        held=result.held,
        share=result.share,
        idle_machine_days=result.mean_idle * result.days,
    )


def ledger_record(ledger: Ledger, machines: int | None, *, now_ns: int) -> FailureRecord | None:
    """Return the failures since the ledger's first job, or since its newest incident without details: the machines that
    were evicted from jobs.

    Args:
        ledger: The open ledger.
        machines: Number of machines in the cluster; None: the number of the ledger's largest job.
        now_ns: The current time, nanoseconds.

    Returns:
        None: no job in the ledger has a start and a number of machines.

    Raises:
        LedgerError: the ledger cannot be read.
    """
    jobs = ledger.jobs()
    start_ns = min((job.started_ns for job in jobs if job.started_ns), default=0)
    sizes = [size for job in jobs if isinstance(size := (job.spec or {}).get("machines"), int) and size > 0]
    count = machines or max(sizes, default=0)
    if not start_ns or not count:
        return None
    incidents = ledger.incidents(documents=["evidence"])
    # Without its evidence, it is not known which machines were in the job, so the record begins after such incidents.
    start_ns = max([start_ns, *(one.closed_ns for one in incidents if one.cleaned_ns and one.closed_ns)])
    evicted = [(machine, one.fault_ns) for one in incidents if one.fault_ns for machine in one.evicted]
    seen = [(machine, one.fault_ns) for one in incidents if one.fault_ns for machine in _in_job(one)]
    return record_from(evicted, seen, machines=count, start_ns=start_ns, until_ns=now_ns)


def _in_job(incident: IncidentRecord) -> set[str]:
    """The machines that were in the job when the incident began."""
    evidence = incident.parsed_evidence()
    return {*(evidence.machines if evidence else ()), *incident.evicted}
