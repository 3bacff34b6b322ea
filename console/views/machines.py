"""The findings of inspections of machines, as text."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from console.terminal import styled
from controlplane import text
from controlplane.queries.machines import MachineReport, OddMachine
from everstep.base.text import listed
from everstep.model.finding import Finding, Health
from everstep.model.pool import PoolPlace

STYLE = {Health.HEALTHY: "green", Health.FAULTY: "red"}
"""Colour of a verdict; yellow for all others."""
OUT_OF_USE = frozenset({str(PoolPlace.QUARANTINED), str(PoolPlace.CORDONED)})
"""Machines in these places are shown first, with the reason."""
HEALTHY_SHOWN = 16
"""If there are more healthy machines than this, they are only counted."""
FINDINGS_SHOWN = 5
"""Number of findings that the list shows for one machine."""


def machines_table(reports: Sequence[MachineReport]) -> Table:
    """A table of all machines, faulty machines first."""
    table = Table(box=None, pad_edge=False)
    for name in ("Machine", "Is", "Verdict", "Since"):
        table.add_column(name, no_wrap=True)
    table.add_column("What", overflow="fold")
    order = {Health.FAULTY: 0, Health.UNKNOWN: 1}
    shown = sorted(reports, key=lambda report: (order.get(report.verdict, 2), report.place not in OUT_OF_USE))
    healthy = [report for report in shown if report.verdict is Health.HEALTHY and report.place not in OUT_OF_USE]
    if len(healthy) > HEALTHY_SHOWN:
        shown = [report for report in shown if report not in healthy]
    for report in shown:
        rows = [(_since(report, found), what(report, found)) for found in report.findings[:FINDINGS_SHOWN]]
        if len(report.findings) > FINDINGS_SHOWN:
            rows.append(("", f"and {len(report.findings) - FINDINGS_SHOWN} more: everstep machines {report.machine}"))
        rows += [("", report.problem)] if report.problem else []
        rows += [("", f"{report.place} by {report.place_by}: {report.place_why}")] if report.place in OUT_OF_USE else []
        rows = rows or [("", "")]
        table.add_row(report.machine, _place(report), styled(report.verdict, _style(report.verdict)), *rows[0])
        for since, line in rows[1:]:
            table.add_row("", "", "", since, line)
    if len(healthy) > HEALTHY_SHOWN:
        table.add_row(f"{len(healthy)} others", "", styled(Health.HEALTHY, _style(Health.HEALTHY)), "", "")
    return table


def machine_table(report: MachineReport) -> Table:
    """A table of one machine, inspection by inspection."""
    table = Table(box=None, pad_edge=False)
    for name in ("Inspection", "Verdict", "Every", "PollAnswers", "Since"):
        table.add_column(name, no_wrap=True)
    table.add_column("What", overflow="fold")
    for inspection in report.inspections:
        ago_s = max(report.now_ns - inspection.looked_ns, 0) / 1e9
        looked = f"{ago_s:.0f} s ago" if inspection.looked_ns else "not yet"
        rows = []
        for found in inspection.findings:
            rows.append((_since(report, found), what(report, found)))
            rows += [("", f"  {line}") for line in found.evidence if line not in found.text]
        rows = rows or [("", inspection.note)]
        every = f"{inspection.interval_s:g} s"
        table.add_row(inspection.name, styled(inspection.verdict, _style(inspection.verdict)), every, looked, *rows[0])
        for since, line in rows[1:]:
            table.add_row("", "", "", "", since, line)
    return table


def measure_lines(report: MachineReport) -> list[str]:
    """The measured values, one line each."""
    facts = [f"{name}: {value}" for name, value in sorted(report.facts.items())]
    measures = [
        f"{name} {value:g}" for inspection in report.inspections for name, value in sorted(inspection.measures.items())
    ]
    return [*facts, *measures]


def what(report: MachineReport, found: Finding) -> str:
    """A finding with its last time if it was repeated, its reason code, its owner, and what to do."""
    last = f", last {text.duration(max(report.now_ns - found.last_ns, 0) / 1e9)} ago" if found.last_ns else ""
    return f"{found.headline}{last} ({found.reason}; owner {found.owner}; {found.remedy})"


def odd_lines(odd: Sequence[OddMachine]) -> list[str]:
    """The facts that differ between machines, one line each."""
    return [
        f"differs: {entry.fact} {entry.value} on {listed(entry.machines, FINDINGS_SHOWN)}"
        + (f", {entry.usual} elsewhere" if entry.usual else "")
        for entry in odd
    ]


def _since(report: MachineReport, found: Finding) -> str:
    return text.duration(max(report.now_ns - found.since_ns, 0) / 1e9) if found.since_ns else text.DASH


def _place(report: MachineReport) -> str:
    """``active gpt``; a dash where it is not known."""
    if not report.place:
        return text.DASH
    return f"{report.place} {report.job}" if report.place == PoolPlace.ACTIVE else report.place


def _style(verdict: Health) -> str:
    return STYLE.get(verdict, "yellow")
