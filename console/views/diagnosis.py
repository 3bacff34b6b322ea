"""The results of diagnostic tests of machines, as text."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from console.terminal import styled
from console.views.machines import STYLE
from everstep.base.text import listed, size_text
from everstep.model.diagnosis import SPEED, Diagnosis, MachineDiagnosis, Measured
from everstep.model.finding import Finding, Health

HEALTHY_SHOWN = 16
"""If there are more healthy machines than this, they are only counted."""
FINDINGS_SHOWN = 5
"""Number of findings that are shown for one machine."""


def diagnosis_table(found: Diagnosis) -> Table:
    """A table of all machines, faulty machines first."""
    table = Table(box=None, pad_edge=False)
    for name in ("Machine", "Verdict"):
        table.add_column(name, no_wrap=True)
    table.add_column("What", overflow="fold")
    order = {Health.FAULTY: 0, Health.UNKNOWN: 1}
    shown = sorted(found.machines, key=lambda one: order.get(one.verdict, 2))
    healthy = [one for one in shown if one.verdict is Health.HEALTHY]
    if len(healthy) > HEALTHY_SHOWN:
        shown = [one for one in shown if one.verdict is not Health.HEALTHY]
    for one in shown:
        lines = list(_lines(one)) or [""]
        for index, line in enumerate(lines):
            name, verdict = (one.machine, str(one.verdict)) if index == 0 else ("", "")
            table.add_row(styled(name, ""), styled(verdict, STYLE.get(one.verdict, "yellow")), styled(line, ""))
    if len(healthy) > HEALTHY_SHOWN:
        table.add_row(styled(f"{len(healthy)} others", ""), styled("healthy", "green"), styled("", ""))
    return table


def _lines(one: MachineDiagnosis) -> Iterator[str]:
    for finding in one.findings[:FINDINGS_SHOWN]:
        yield _line(finding)
    if len(one.findings) > FINDINGS_SHOWN:
        yield f"and {len(one.findings) - FINDINGS_SHOWN} more, with --json"
    if nothing := [f"{result.test}: {result.nothing}" for result in one.results if result.nothing]:
        yield f"nothing to test: {listed(nothing)}"


def _line(finding: Finding) -> str:
    return f"{finding.inspection}: {finding.headline} ({finding.reason}; owner {finding.owner}; {finding.remedy})"


def link_lines(found: Diagnosis) -> list[str]:
    """One line for each link between machines that does not work."""
    return [f"faulty link: {' and '.join(link.machines)}, {link.test}: {link.text}" for link in found.links]


def measured_table(found: Diagnosis) -> Table:
    """A table of every measured figure, over all machines that have it."""
    table = Table(box=None, pad_edge=False)
    for name in ("Measured", "On", "Low", "Median", "High", "Lowest"):
        table.add_column(name, no_wrap=name != "Lowest")
    for one in found.measured:
        values = [_figure(one, value) for value in (one.low, one.median, one.high)]
        table.add_row(*(styled(text, "") for text in (one.name, str(one.machines), *values, one.lowest)))
    return table


def _figure(one: Measured, value: float) -> str:
    name = one.name.partition("{")[0]
    if name.endswith(SPEED):
        return f"{size_text(value)}/s"
    return size_text(value) if name.endswith("bytes") else f"{value:g}"
