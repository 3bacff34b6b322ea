"""The status of jobs as text."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone

from rich.table import Table

from console.terminal import styled
from controlplane import text
from controlplane.queries.metrics import metrics_lines
from controlplane.queries.saved import saved_lines, saved_short
from controlplane.queries.status import JobLine, JobReport, MachineStatus
from controlplane.queries.time_lost import lost_text
from everstep.model.job_state import RUNNING_SLOW
from everstep.model.stage import NOT_CONFIRMED

STYLE = {"running": "green", "finished": "green"} | dict.fromkeys(
    ("recovering", "starting", "stopping", NOT_CONFIRMED, RUNNING_SLOW), "yellow"
)
"""Status → its colour; all others are red."""
PROBLEMS_SHOWN = 5


def jobs_table(lines: Sequence[JobLine]) -> Table:
    """A table of all jobs, one line each."""
    table = Table(box=None, pad_edge=False)
    for name in ("Job", "Status", "Started", "Ran"):
        table.add_column(name, no_wrap=True)
    for name in ("Step", "Saved/backup/disk", "Loss", "Ranks", "Generation", "Incidents", "ETTR"):
        table.add_column(name, justify="right", no_wrap=True)
    for line in lines:
        table.add_row(
            line.name,
            styled(line.status, STYLE.get(line.status, "red")),
            line.started.astimezone().strftime("%m-%d %H:%M"),
            text.duration(_ran(line.started, line.ended)),
            _number(line.step),
            saved_short(line.saved),
            text.loss(line.loss),
            _number(line.ranks),
            _number(line.generation),
            _number(line.incidents),
            text.ratio(line.ettr),
        )
    return table


def problem_lines(lines: Sequence[JobLine]) -> list[str]:
    """The reasons why facts about jobs are missing; if there are many reasons, only the first ones."""
    problems = [line.problem for line in lines if line.problem]
    more = [f"and {len(problems) - PROBLEMS_SHOWN} more"] if len(problems) > PROBLEMS_SHOWN else []
    return [*problems[:PROBLEMS_SHOWN], *more]


def _at_most(report: JobReport) -> str:
    if not report.ettr_unknown:
        return text.ratio(report.ettr)
    why = f"not known: {', '.join(report.ettr_unknown)}"
    return f"unknown ({why})" if report.ettr is None else f"at most {text.ratio(report.ettr)} ({why})"


def job_facts(report: JobReport) -> list[tuple[str, str]]:
    """The facts about one job, in reading order."""
    hour = f" ({text.ratio(report.ettr_last_hour)} in the last hour)" if report.ettr_last_hour is not None else ""
    why = report.outcome or report.unconfirmed
    facts = [
        ("status", f"{report.status}{': ' + why if why else ''}"),
        ("script", " ".join([report.script, *report.args])),
        ("size", f"{report.world_size} ranks: {report.sizes}"),
    ]
    if report.code:
        facts.append(("code", report.code))
    if report.launched:
        facts += [
            ("step", f"{_number(report.step)}, loss {text.loss(report.loss)}, generation {report.generation}"),
            ("ETTR", f"{_at_most(report)}{hour}"),
        ]
    if report.time_lost:
        facts.append(("lost", lost_text(report.time_lost)))
    if report.metrics:
        facts += metrics_lines(report.metrics)
    took = f", ran {text.duration(_ran(report.started, report.ended))}" if report.launched else ""
    facts.append(("started", f"{text.moment(report.started)}{took}"))
    if report.saved:
        facts += saved_lines(report.saved)
    if report.kept:
        facts.append(("kept", report.kept))
    if report.backups:
        facts.append(("backups", report.backups))
    if report.silent:
        facts.append(("no answer", f"{', '.join(report.silent)}: the ranks there may still be stepping"))
    if report.open_incident:
        incident = report.open_incident
        stage = f", at stage {incident.stage}" if incident.stage else ""
        facts.append(("incident", f"{incident.id} is open{stage}: {incident.headline}"))
    facts += [("rejected", line) for line in report.rejected]
    if report.link:
        facts.append(("link", report.link))
    return facts


def machine_rows(machines: Sequence[MachineStatus], *, ended: bool = False) -> list[tuple[str, str]]:
    """Each machine with its ranks and their pids; for an ended job, only machines that still have ranks."""
    return [(machine.name, _ranks(machine)) for machine in machines if machine.ranks or not ended]


def _ranks(machine: MachineStatus) -> str:
    if not machine.answers:
        return machine.problem or f"its agent at {machine.address} does not answer"
    if not machine.ranks:
        return "no ranks"
    return ", ".join(
        f"r{rank.rank} pid {rank.pid}{'' if rank.alive else ' done' if rank.finished else ' dead'}"
        for rank in machine.ranks
    )


def incidents_table(report: JobReport) -> Table:
    """A table of the last incidents."""
    table = Table(box=None, pad_edge=False)
    table.add_column("Incident", no_wrap=True)
    table.add_column("What")
    table.add_column("Lost steps", justify="right")
    table.add_column("Took", justify="right", no_wrap=True)
    for incident in report.incidents:
        stage = "" if incident.resolution else f"  [{incident.stage or 'open'}]"
        lost, took = _number(incident.lost_steps), text.duration(incident.seconds)
        table.add_row(f"{incident.number:04d}", incident.headline + stage, lost, took)
    return table


def _number(value: int | None) -> str:
    return text.DASH if value is None else str(value)


def _ran(started: datetime, ended: datetime | None) -> float:
    return ((ended or datetime.now(timezone.utc)) - started).total_seconds()  # noqa: UP017 - as the client gives it
