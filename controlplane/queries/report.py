"""The report over some days from the ledger: incidents, lost time, evicted machines, and ETTR of jobs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from datetime import date, datetime, timedelta

from pydantic import BaseModel, Field, ValidationError

from activities.ledger.ledger import Ledger
from activities.ledger.records import IncidentRecord, LedgerJob
from activities.ledger.time_spent import TimeSpent
from activities.pool.look_at_machines import RETURNED
from controlplane.queries.time_lost import ORDER
from everstep.decisions.act.evict.rules import OPERATOR
from everstep.decisions.blame.first_failure import fault_owner
from everstep.decisions.hindsight import Hindsight, JudgedVerdict, LaterEvents, PastIncident, judged
from everstep.decisions.training_time.time_lost import Cause
from everstep.model.finding import FindingSource, Health, Owner
from everstep.model.incident import Anomaly, IncidentReport

DAY_NS = 86_400 * 10**9
UNKNOWN = "unknown"
WHY_SHOWN = 4
"""At most this many reasons of one row of verdicts are kept."""


class IncidentTally(BaseModel):
    """The number of incidents with one symptom or one owner."""

    name: str
    """The symptom or the owner, or ``unknown``."""
    incidents: int
    open: int
    seconds: float
    """Sum of the times from fault to first step, over the incidents for which this time is known."""
    unknown: int
    """Number of closed incidents for which this time is not known, e.g. because no step was reported."""


class DayTally(BaseModel):
    """The number of incidents on one day."""

    day: date
    """The date, by the clock of this computer."""
    incidents: int


class MachineTally(BaseModel):
    """A machine that left jobs."""

    machine: str
    evictions: int
    last: datetime
    """Time of its last eviction."""


class RunShare(BaseModel):
    """The part of one run of a job that lies within the days of the report."""

    job: str
    run: int
    """The run's number in the ledger."""
    started: datetime | None
    """Start of the run; None: not known."""
    ended: datetime | None
    """End of the run; None: the ledger has no end of it."""
    outcome: str
    ettr: float | None
    """ETTR of this part; None: not known."""
    unknown: list[str] = Field(default_factory=list)
    """Facts about lost time that are not known; because of them, the true ratio may be lower."""
    seconds: float | None
    """Length of this part, seconds; None: not known."""
    lost: dict[Cause, float] = Field(default_factory=dict)
    """Unproductive seconds of this part, by cause."""


class VerdictTally(BaseModel):
    """The verdicts about one job's incidents in one month with one owner, and what later events showed."""

    job: str
    month: str
    """The month by the clock of this computer: ``2026-11``."""
    owner: Owner
    """The owner that the incidents acted on: the machine that was evicted, the code that was rolled back, or the owner
    of the fault."""
    verdicts: int
    confirmed: int
    refuted: int
    open: int
    """Number of verdicts that no later event confirms or refutes."""
    why: list[str]
    """How the verdicts were confirmed or refuted, with their numbers, the most frequent first."""


class InspectionTally(BaseModel):
    """The findings of one inspection that named a fault of a machine in an incident."""

    inspection: str
    findings: int
    false_alarms: int
    """Findings in incidents whose verdict was refuted."""
    per_machine_day: float | None
    """False alarms for each day of a machine in a job; None: that time is not known."""


class LedgerReport(BaseModel):
    """The report over some days; the JSON of ``everstep report``."""

    days: int
    since: datetime
    until: datetime
    empty: bool
    """Whether the ledger has neither a job nor an incident."""
    incidents: int
    open: int
    by_symptom: list[IncidentTally]
    by_owner: list[IncidentTally]
    by_day: list[DayTally]
    """All days, oldest first."""
    lost: dict[Cause, float]
    """Unproductive seconds of all jobs together, by cause."""
    machines: list[MachineTally]
    """Evicted machines, the most frequent first."""
    jobs: list[RunShare]
    """Runs of jobs, newest first."""
    verdicts: list[VerdictTally] = Field(default_factory=list)
    """The verdicts by job, month and owner."""
    inspections: list[InspectionTally] = Field(default_factory=list)
    innocent: list[str] = Field(default_factory=list)
    """Machines that were evicted and were innocent, once for each eviction."""
    over_evicted: int = 0
    """Machines that were evicted on purpose without a sign of a fault, beside a machine at fault."""
    machine_days: float | None = None
    """Days of machines in jobs, together; None: not known."""
    notes: list[str] = Field(default_factory=list)
    """Entries of the ledger that were not counted, with the reasons."""


def ledger_report(ledger: Ledger, *, days: int, now_ns: int) -> LedgerReport:
    """The report over the last days.

    Args:
        ledger: The open ledger.
        days: Number of days, up to now.
        now_ns: The current time, nanoseconds.

    Raises:
        LedgerError: the ledger cannot be read.
    """
    since_ns = now_ns - days * DAY_NS
    runs = ledger.jobs()
    incidents = ledger.incidents(since_ns=since_ns, documents=["anomaly", "report"])
    past, over_evicted = [], 0
    for one in incidents:  # reading a report takes long, so each is read once
        told = one.parsed_report()
        past.append(_past(one, told))
        over_evicted += _over_evicted(one, told)
    shares = [_share(ledger, run, runs, since_ns, now_ns) for run in runs if _overlaps(run, since_ns, now_ns)]
    verdicts = judged(_later_events(ledger, runs, past, now_ns))
    machine_days = _machine_days(runs, shares)
    return LedgerReport(
        days=days,
        since=_time(since_ns),
        until=_time(now_ns),
        empty=not runs and not incidents,
        incidents=len(incidents),
        open=sum(one.closed_ns is None for one in incidents),
        by_symptom=_tallies((one.symptom or UNKNOWN, one) for one in incidents),
        by_owner=_tallies((known.owner, one) for known, one in zip(past, incidents, strict=True)),
        by_day=_by_day(incidents, _time(since_ns).date(), _time(now_ns).date()),
        lost={cause: sum(share.lost.get(cause, 0.0) for share in shares) for cause in ORDER},
        machines=_machines(incidents),
        jobs=shares,
        verdicts=_verdicts(verdicts),
        inspections=_inspections(verdicts, machine_days),
        innocent=sorted(machine for verdict in verdicts for machine in verdict.innocent),
        over_evicted=over_evicted,
        machine_days=machine_days,
        notes=_notes(incidents, shares),
    )


def owner_of(incident: IncidentRecord, report: IncidentReport | None) -> Owner:
    """The owner of an incident's fault; the owner may change until the incident is closed."""
    if report:
        return fault_owner(report.classification, report.findings)
    try:
        anomaly = Anomaly.model_validate(incident.anomaly)
    except ValidationError:
        return Owner.UNKNOWN
    return fault_owner(anomaly.classification, anomaly.findings)


def _later_events(ledger: Ledger, runs: Sequence[LedgerJob], past: Sequence[PastIncident], now_ns: int) -> LaterEvents:
    """The events of the ledger that decide about verdicts."""
    returned: dict[str, list[int]] = defaultdict(list)
    for event in ledger.machine_events(kind=RETURNED):
        returned[event.machine].append(event.time_ns)
    return LaterEvents(
        now_ns,
        sorted(past, key=lambda one: one.at_ns),
        returned,
        {(decided.run, decided.incident): Owner(decided.was) for decided in ledger.verdicts()},
        {run.run: run.ended_ns for run in runs if run.ended_ns is not None},
    )


def _past(incident: IncidentRecord, report: IncidentReport | None) -> PastIncident:
    answers = report.asked if report else []
    rules = {answer.machine: answer.rule for answer in reversed(answers) if answer.yes}
    by_operator = {answer.machine for answer in answers if answer.rule == OPERATOR and answer.yes}
    findings = [about for about in (report.findings if report else []) if about.finding.verdict is Health.FAULTY]
    return PastIncident(
        id=incident.id,
        job=incident.job,
        run=incident.run,
        at_ns=_at_ns(incident),
        closed_ns=incident.closed_ns,
        owner=owner_of(incident, report),
        resolution=incident.resolution or "",
        cause=incident.cause or "",
        evicted={machine: rules.get(machine, "") for machine in incident.evicted if machine not in by_operator},
        faults=[
            (about.machine, about.finding.inspection)
            for about in findings
            if about.finding.source is FindingSource.INSPECTION and about.finding.owner is Owner.MACHINE
        ],
    )


def _over_evicted(incident: IncidentRecord, report: IncidentReport | None) -> int:
    if report is None or report.hang is None or not set(report.hang.machines) <= set(incident.evicted):
        return 0
    return report.hang.innocent


def _machine_days(runs: Sequence[LedgerJob], shares: Sequence[RunShare]) -> float | None:
    """The days of machines in jobs; None: a run's length or number of machines is not known."""
    machines = {run.run: (run.spec or {}).get("machines") for run in runs}
    parts = [(share.seconds, machines[share.run]) for share in shares]
    known = [seconds * count / 86_400 for seconds, count in parts if seconds is not None and isinstance(count, int)]
    return sum(known) if len(known) == len(parts) else None


def _verdicts(verdicts: Sequence[JudgedVerdict]) -> list[VerdictTally]:
    groups: dict[tuple[str, str, Owner], list[JudgedVerdict]] = defaultdict(list)
    for verdict in verdicts:
        month = _time(verdict.incident.at_ns).strftime("%Y-%m")
        groups[verdict.incident.job, month, verdict.owner].append(verdict)
    return [
        VerdictTally(
            job=job,
            month=month,
            owner=owner,
            verdicts=len(group),
            confirmed=sum(one.hindsight is Hindsight.CONFIRMED for one in group),
            refuted=sum(one.hindsight is Hindsight.REFUTED for one in group),
            open=sum(one.hindsight is Hindsight.OPEN for one in group),
            why=[
                f"{why} ({count} times)" if count > 1 else why
                for why, count in Counter(one.why for one in group if one.why).most_common(WHY_SHOWN)
            ],
        )
        for (job, month, owner), group in sorted(groups.items())
    ]


def _inspections(verdicts: Sequence[JudgedVerdict], machine_days: float | None) -> list[InspectionTally]:
    findings = Counter(name for verdict in verdicts for _, name in verdict.incident.faults)
    false = Counter(name for verdict in verdicts for name in verdict.false_alarms)
    return [
        InspectionTally(
            inspection=name,
            findings=count,
            false_alarms=false[name],
            per_machine_day=false[name] / machine_days if machine_days else None,
        )
        for name, count in findings.most_common()
    ]


def _time(time_ns: int) -> datetime:
    return datetime.fromtimestamp(time_ns / 1e9).astimezone()


def _at_ns(incident: IncidentRecord) -> int:
    return incident.fault_ns or incident.closed_ns or 0


def _overlaps(run: LedgerJob, since_ns: int, now_ns: int) -> bool:
    return run.started_ns <= now_ns and (run.ended_ns is None or run.ended_ns >= since_ns)


def _share(ledger: Ledger, run: LedgerJob, runs: Sequence[LedgerJob], since_ns: int, now_ns: int) -> RunShare:
    """The part of a run within the days; its ETTR is unknown if the ledger does not have the run's start or end."""
    newest = max((one.started_ns, one.run) for one in runs if one.name == run.name)
    runs_now = run.ended_ns is None and (run.started_ns, run.run) == newest
    spent: TimeSpent | None = None
    problem = "the ledger does not have its start" if not run.started_ns else "the ledger does not have its end"
    if run.started_ns and (runs_now or run.ended_ns is not None):
        windows = ledger.time_spent(run.run, now_ns=now_ns, since_ns=[since_ns])
        spent = windows[0] if windows else None
    return RunShare(
        job=run.name,
        run=run.run,
        started=_time(run.started_ns) if run.started_ns else None,
        ended=_time(run.ended_ns) if run.ended_ns else None,
        outcome=run.outcome or ("running" if runs_now else UNKNOWN),
        ettr=spent.ettr.ratio if spent else None,
        unknown=list(spent.ettr.unknown) if spent else [problem],
        seconds=spent.ettr.wall_s if spent else None,
        lost={cause: spent.causes[cause] for cause in ORDER} if spent else {},
    )


def _tallies(named: Iterable[tuple[str, IncidentRecord]]) -> list[IncidentTally]:
    groups: dict[str, list[IncidentRecord]] = defaultdict(list)
    for name, incident in named:
        groups[str(name)].append(incident)
    tallies = [
        IncidentTally(
            name=name,
            incidents=len(group),
            open=sum(one.closed_ns is None for one in group),
            seconds=sum(one.seconds or 0.0 for one in group),
            unknown=sum(one.seconds is None and one.closed_ns is not None for one in group),
        )
        for name, group in groups.items()
    ]
    return sorted(tallies, key=lambda tally: (-tally.incidents, tally.name))


def _by_day(incidents: Sequence[IncidentRecord], first: date, last: date) -> list[DayTally]:
    counts: dict[date, int] = defaultdict(int)
    for incident in incidents:
        counts[_time(_at_ns(incident)).date()] += 1
    days = (first + timedelta(days=number) for number in range((last - first).days + 1))
    return [DayTally(day=day, incidents=counts[day]) for day in days]


def _machines(incidents: Sequence[IncidentRecord]) -> list[MachineTally]:
    times: dict[str, list[int]] = defaultdict(list)
    for incident in incidents:
        for machine in incident.evicted:
            times[machine].append(_at_ns(incident))
    tallies = [MachineTally(machine=name, evictions=len(at), last=_time(max(at))) for name, at in times.items()]
    return sorted(tallies, key=lambda tally: (-tally.evictions, tally.machine))


def _notes(incidents: Sequence[IncidentRecord], shares: Sequence[RunShare]) -> list[str]:
    unread = [f"{one.id}: {one.problem}" for one in incidents if one.problem]
    if cleaned := sum(one.cleaned_ns is not None for one in incidents):
        unread.append(f"the owners of {cleaned} incidents are unknown: their details were deleted since they are old")
    unknown = [f"job {one.job}, run {one.run}: {_not_known(one)}" for one in shares if one.unknown]
    return [*unread, *unknown]


def _not_known(share: RunShare) -> str:
    why = ", ".join(share.unknown)
    if share.seconds is None:
        return f"its ETTR and lost time are unknown: {why}"
    return f"its ETTR is {'unknown' if share.ettr is None else 'an upper limit'}, since some facts are missing: {why}"
