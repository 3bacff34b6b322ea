"""The report over some days from the ledger: incidents, lost time, evicted machines, and ETTR of jobs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import date, datetime, timedelta

from pydantic import BaseModel, Field, ValidationError

from activities.ledger.ledger import Ledger
from activities.ledger.records import IncidentRecord, LedgerJob
from activities.ledger.time_spent import TimeSpent
from controlplane.queries.time_lost import ORDER
from everstep.decisions.blame.first_failure import fault_owner
from everstep.decisions.training_time.time_lost import Cause
from everstep.model.finding import Owner
from everstep.model.incident import Anomaly

DAY_NS = 86_400 * 10**9
UNKNOWN = "unknown"


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
    incidents = ledger.incidents(since_ns=since_ns)
    shares = [_share(ledger, run, runs, since_ns, now_ns) for run in runs if _overlaps(run, since_ns, now_ns)]
    return LedgerReport(
        days=days,
        since=_time(since_ns),
        until=_time(now_ns),
        empty=not runs and not incidents,
        incidents=len(incidents),
        open=sum(one.closed_ns is None for one in incidents),
        by_symptom=_tallies((one.symptom or UNKNOWN, one) for one in incidents),
        by_owner=_tallies((owner_of(one), one) for one in incidents),
        by_day=_by_day(incidents, _time(since_ns).date(), _time(now_ns).date()),
        lost={cause: sum(share.lost.get(cause, 0.0) for share in shares) for cause in ORDER},
        machines=_machines(incidents),
        jobs=shares,
        notes=_notes(incidents, shares),
    )


def owner_of(incident: IncidentRecord) -> Owner:
    """The owner of an incident's fault; the owner may change until the incident is closed."""
    if report := incident.parsed_report():
        return fault_owner(report.classification, report.findings)
    try:
        anomaly = Anomaly.model_validate(incident.anomaly)
    except ValidationError:
        return Owner.UNKNOWN
    return fault_owner(anomaly.classification, anomaly.findings)


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
    unknown = [f"job {one.job}, run {one.run}: {_not_known(one)}" for one in shares if one.unknown]
    return [*unread, *unknown]


def _not_known(share: RunShare) -> str:
    why = ", ".join(share.unknown)
    if share.seconds is None:
        return f"its ETTR and lost time are unknown: {why}"
    return f"its ETTR is {'unknown' if share.ettr is None else 'an upper limit'}, since some facts are missing: {why}"
