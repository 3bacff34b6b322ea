"""The report over some days as lines of text."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from console.terminal import aligned
from controlplane import text
from controlplane.queries.report import IncidentTally, InspectionTally, LedgerReport, RunShare, VerdictTally
from controlplane.queries.time_lost import LEAST_S, ORDER, causes_text
from everstep.base.text import listed
from everstep.decisions.training_time.time_lost import Cause

SHOWN = 20
"""At most this many rows of a table are shown; the rest are counted."""


def headline(report: LedgerReport) -> str:
    """One line with the days, the number of incidents and the number of jobs."""
    if report.empty:
        return "the ledger is empty: no job has run yet"
    still_open = f" ({report.open} open)" if report.open else ""
    return (
        f"{text.counted(report.days, 'day')} until {text.moment(report.until)}: "
        f"{text.counted(report.incidents, 'incident')}{still_open}, {text.counted(len(report.jobs), 'run')} of jobs"
    )


def report_lines(report: LedgerReport) -> list[str]:
    """All lines of the report; tables without rows are left out."""
    if report.empty:
        return [headline(report)]
    blocks = [
        _block(("Symptom", "Incidents", "Took"), [tally_row(tally) for tally in report.by_symptom]),
        _block(("Owner", "Incidents", "Took"), [tally_row(tally) for tally in report.by_owner]),
        _block(
            ("Time lost to", "All jobs"), [(cause, text.duration(seconds)) for cause, seconds in lost_causes(report)]
        ),
        _block(
            ("Machine", "Evictions", "Last"),
            [(machine.machine, str(machine.evictions), text.moment(machine.last)) for machine in report.machines],
        ),
        _block(
            ("Verdicts", "Month", "Owner", "Number", "Confirmed", "Refuted", "Open", "By"),
            [verdict_row(tally) for tally in report.verdicts],
        ),
        _block(
            ("Inspection", "Findings", "False alarms", "Per machine-day"),
            [inspection_row(tally) for tally in report.inspections],
        ),
        _block(("Job", "Started", "Ran", "ETTR", "Lost to", "Outcome"), [job_row(share) for share in report.jobs]),
    ]
    lines = [headline(report)]
    for block in blocks:
        lines += ["", *block] if block else []
    if report.incidents and not report.machines:
        lines += ["", "no machine was evicted"]
    if report.over_evicted or report.innocent:
        lines += ["", innocent_text(report)]
    return [*lines, "", *(f"note: {note}" for note in report.notes)] if report.notes else lines


def lost_causes(report: LedgerReport) -> list[tuple[Cause, float]]:
    """The causes of lost time with their seconds, in the order of an incident."""
    return [(cause, report.lost[cause]) for cause in ORDER if report.lost.get(cause, 0.0) >= LEAST_S]


def tally_row(tally: IncidentTally) -> tuple[str, str, str]:
    """The cells of a row: symptom or owner, number of incidents, time."""
    still_open = f" ({tally.open} open)" if tally.open else ""
    timed = tally.incidents - tally.open - tally.unknown
    parts = [text.duration(tally.seconds)] if timed else []
    parts += [f"{tally.unknown} unknown"] if tally.unknown else []
    return tally.name, f"{tally.incidents}{still_open}", ", ".join(parts) or text.DASH


def verdict_row(tally: VerdictTally) -> tuple[str, ...]:
    """The cells of a row: the verdicts about the incidents of a job in a month with one owner."""
    numbers = tally.verdicts, tally.confirmed, tally.refuted, tally.open
    return tally.job, tally.month, tally.owner, *map(str, numbers), "; ".join(tally.why) or text.DASH


def inspection_row(tally: InspectionTally) -> tuple[str, ...]:
    """The cells of a row: the findings of an inspection, and its false alarms."""
    rate = "unknown" if tally.per_machine_day is None else f"{tally.per_machine_day:.3g}"
    return tally.inspection, str(tally.findings), str(tally.false_alarms), rate


def innocent_text(report: LedgerReport) -> str:
    """One line with the evictions of machines without a fault."""
    names = f" ({listed(report.innocent)})" if report.innocent else ""
    return (
        f"evicted without a fault: {text.counted(len(report.innocent), 'machine')} by a wrong verdict{names}, "
        f"{text.counted(report.over_evicted, 'machine')} on purpose beside a machine at fault"
    )


def ettr_text(share: RunShare) -> str:
    """The ETTR of a run: a ratio, ``at most`` a ratio if not all lost time is known, or ``unknown``."""
    if share.ettr is None:
        return "unknown"
    return f"at most {text.ratio(share.ettr)}" if share.unknown else text.ratio(share.ettr)


def job_row(share: RunShare) -> tuple[str, ...]:
    """The cells of a row in the table of jobs."""
    started = share.started.astimezone().strftime("%m-%d %H:%M") if share.started else "unknown"
    ran = "unknown" if share.seconds is None else text.duration(share.seconds)
    lost = "unknown" if share.seconds is None else causes_text(share.lost)
    return share.job, started, ran, ettr_text(share), lost, share.outcome


def day(when: datetime) -> str:
    """The local date, such as ``2026-01-31``."""
    return when.astimezone().strftime("%Y-%m-%d")


def _block(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    if not rows:
        return []
    more = [f"and {len(rows) - SHOWN} more"] if len(rows) > SHOWN else []
    return [*aligned([header, *rows[:SHOWN]]), *more]
