"""``everstep machines``: show which job has each machine, and the findings of the machine's inspections."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from console.commands.shared import ClusterOption, finish
from console.terminal import PlainConsole, styled, together
from controlplane import text
from everstep.base.text import listed
from everstep.errors import ConfigError
from everstep.model.finding import Finding, Health
from everstep.model.pool import PoolPlace

if TYPE_CHECKING:
    from rich.console import RenderableType

    from controlplane.client import Control
    from controlplane.queries.machines import MachineReport, OddMachine
    from everstep.model.machine import Machine

WATCH_S = 1.0
"""Time between two polls of --watch, seconds."""
VERDICT_STYLE = {Health.HEALTHY: "green", Health.FAULTY: "red"}
"""Verdict → its colour; all other verdicts are yellow."""
OUT_OF_USE = frozenset({str(PoolPlace.QUARANTINED), str(PoolPlace.CORDONED)})
"""Machines in these states are shown first, with the reason."""
HEALTHY_SHOWN = 16
"""If there are more healthy machines than this, they are only counted."""
FINDINGS_SHOWN = 5
"""Number of findings that the list shows for one machine."""


def machines(  # noqa: PLR0917
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[MACHINE]...", help="Show only these machines, with all inspections.")
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Show the machines again every second, until Ctrl-C.")] = False,
    measures: Annotated[
        bool, typer.Option("--measures", help="With a machine: show every measured value too.")
    ] = False,
    clear: Annotated[
        str, typer.Option(metavar="REASON", help="You repaired the machines: clear findings with this reason code.")
    ] = "",
    record: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Append findings to a recording, until Ctrl-C.")
    ] = None,
    every: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.1, help="With --record: time between two polls.")
    ] = 60.0,
    cluster: ClusterOption = "default",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, one entry for each machine.")] = False,
) -> None:
    """Show which job has each machine, whether the machine is healthy, faulty or unknown, why, and what to do.

    A machine is active for a job, a standby, free, cordoned by an operator, or quarantined after an eviction.
    'everstep evict' and 'everstep release' change that.

    A verdict is unknown if a part of the machine could not be inspected, or if it is not clear whether the machine is
    at fault. It is also unknown if the agent does not answer. Unknown is not a fault of the machine.

    The machines are those of the local cluster, or of the inventory that EVERSTEP_INVENTORY names. Inspections, reason
    codes and settings: docs/concepts/inspections.md.

    A finding about a line of the kernel log stays active until the machine is rebooted, or for a limited time. A
    finding about a comparison with an earlier state, such as less memory or a read-only file system, stays active as
    long as the difference exists. --clear ends both kinds for the named machines: past events no longer count, and the
    present state becomes the state to compare with. The inspections then run again, and the command shows the result.

    A recording has one line of JSON for each machine and poll. `everstep policy simulate` shows what a policy would
    have decided about the recorded findings.

    Examples:

        everstep machines

        everstep machines m2 --watch

        everstep machines m2 --clear xid-79

        everstep machines --record events.jsonl --every 30

        everstep machines --json | jq '.[] | select(.verdict == "faulty") | .machine'

    Exit codes: 0 shown; 1 nothing to clear; 2 no such machine; 3 no cluster.
    """
    if clear:
        finish(_clear(names or [], cluster, clear, as_json=as_json))
    if record is not None:
        finish(_record(names or [], cluster, record, every))
    finish(_machines(names or [], cluster, watch=watch, measures=measures, as_json=as_json))


async def _clear(names: list[str], cluster: str, reason: str, *, as_json: bool) -> int:
    from controlplane.client import Control

    if not names:
        raise ConfigError(f"--clear {reason}: name the machines that were repaired")
    async with await Control.connect(cluster) as control:
        counts = {}
        for machine in machines_named(control, names):
            counts[machine.name] = (await control.agents.get(machine.address).clear(reason)).cleared
        reports = await _reports(control, names)
    if not as_json:
        for name, count in counts.items():
            cleared = text.counted(count, "finding")
            print(f"{name}: {cleared} cleared" if count else f"{name}: no finding has the reason code {reason}")
    _show(reports, full=True, measures=False, as_json=as_json)
    return 0 if any(counts.values()) else 1


async def _record(names: list[str], cluster: str, path: Path, every_s: float) -> int:
    from controlplane.client import Control
    from controlplane.recording import MachineRecorder

    recorder = MachineRecorder()
    async with await Control.connect(cluster) as control:
        count = text.counted(len(machines_named(control, names)), "machine")
        print(f"recording {count} to {path}, every {every_s:g} s, until Ctrl-C", file=sys.stderr)
        while True:
            asked_ns = time.time_ns()
            reports = await _reports(control, names)
            lines = recorder.lines(reports, asked_ns, time.time_ns())
            try:
                with path.open("a") as file:  # opened again at each poll, since the file may have been moved away
                    file.writelines(f"{line}\n" for line in lines)
            except OSError as error:
                raise ConfigError(f"the recording {path} cannot be written: {error.strerror or error}") from error
            await asyncio.sleep(every_s)


async def _machines(names: list[str], cluster: str, *, watch: bool, measures: bool, as_json: bool) -> int:
    from controlplane.client import Control

    async with await Control.connect(cluster) as control:
        if not watch:
            _show(await _reports(control, names), full=bool(names), measures=measures, as_json=as_json)
            return 0
        from rich.live import Live

        with Live(console=PlainConsole(), auto_refresh=False, screen=False) as live:
            while True:
                reports = await _reports(control, names)
                live.update(_rendered(reports, full=bool(names), measures=measures), refresh=True)
                await asyncio.sleep(WATCH_S)


async def _reports(control: Control, names: list[str]) -> list[MachineReport]:
    from controlplane.machine_pool import pool_state
    from controlplane.queries.machines import ask_machines, with_places

    machines = machines_named(control, names)
    reports, pool = await asyncio.gather(ask_machines(control.agents, machines), pool_state(control))
    return with_places(reports, pool)


def machines_named(control: Control, names: Sequence[str]) -> list[Machine]:
    """The machines with these names, or all machines if no name is given.

    Raises:
        ConfigError: there is no such machine.
    """
    by_name = {machine.name: machine for machine in control.all_machines}
    if unknown := [name for name in names if name not in by_name]:
        raise ConfigError(f"there is no machine {listed(unknown, 5)}; there are {listed(sorted(by_name), 20)}")
    return [by_name[name] for name in names or by_name]


def _show(reports: list[MachineReport], *, full: bool, measures: bool, as_json: bool) -> None:
    if as_json:
        print(json.dumps([report.model_dump(mode="json") for report in reports], indent=2))
    else:
        PlainConsole().print(_rendered(reports, full=full, measures=measures), soft_wrap=False)


def _rendered(reports: list[MachineReport], *, full: bool, measures: bool) -> RenderableType:
    from controlplane.queries.machines import odd_ones

    if not full:
        return together(machines_table(reports), *odd_lines(odd_ones(reports)))
    parts: list[RenderableType] = []
    for report in reports:
        parts.append(f"{report.machine}  {report.address}  {report.verdict}  {report.problem}".rstrip())
        parts.append(machine_table(report))
        parts += measure_lines(report) if measures else []
    return together(*parts)


def machines_table(reports: Sequence[MachineReport]) -> Table:
    """A table of all machines, faulty machines first."""
    table = Table(box=None, pad_edge=False)
    for name in ("Machine", "Use", "Verdict", "Since"):
        table.add_column(name, no_wrap=True)
    table.add_column("What", overflow="fold")
    order = {Health.FAULTY: 0, Health.UNKNOWN: 1}
    shown = sorted(reports, key=lambda report: (order.get(report.verdict, 2), report.place not in OUT_OF_USE))
    healthy = [report for report in shown if report.verdict is Health.HEALTHY and report.place not in OUT_OF_USE]
    if len(healthy) > HEALTHY_SHOWN:
        shown = [report for report in shown if report not in healthy]
    for report in shown:
        rows = [(_since(report, finding), what(report, finding)) for finding in report.findings[:FINDINGS_SHOWN]]
        if len(report.findings) > FINDINGS_SHOWN:
            rows.append(("", f"and {len(report.findings) - FINDINGS_SHOWN} more: everstep machines {report.machine}"))
        rows += [("", report.problem)] if report.problem else []
        rows += [("", f"{report.place} by {report.place_by}: {report.place_why}")] if report.place in OUT_OF_USE else []
        rows = rows or [("", "")]
        table.add_row(report.machine, _use(report), styled(report.verdict, _style(report.verdict)), *rows[0])
        for since, line in rows[1:]:
            table.add_row("", "", "", since, line)
    if len(healthy) > HEALTHY_SHOWN:
        table.add_row(f"{len(healthy)} others", "", styled(Health.HEALTHY, _style(Health.HEALTHY)), "", "")
    return table


def machine_table(report: MachineReport) -> Table:
    """A table of one machine, inspection by inspection."""
    table = Table(box=None, pad_edge=False)
    for name in ("Inspection", "Verdict", "Every", "Inspected", "Since"):
        table.add_column(name, no_wrap=True)
    table.add_column("What", overflow="fold")
    for inspection in report.inspections:
        ago_s = max(report.now_ns - inspection.looked_ns, 0) / 1e9
        inspected = f"{ago_s:.0f} s ago" if inspection.looked_ns else "not yet"
        rows = []
        for finding in inspection.findings:
            rows.append((_since(report, finding), what(report, finding)))
            rows += [("", f"  {line}") for line in finding.evidence if line not in finding.text]
        rows = rows or [("", inspection.note)]
        every = f"{inspection.interval_s:g} s"
        verdict = styled(inspection.verdict, _style(inspection.verdict))
        table.add_row(inspection.name, verdict, every, inspected, *rows[0])
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


def what(report: MachineReport, finding: Finding) -> str:
    """A finding, the time of its last repetition, its reason code, its owner, and what to do."""
    last = f", last {text.duration(max(report.now_ns - finding.last_ns, 0) / 1e9)} ago" if finding.last_ns else ""
    return f"{finding.headline}{last} ({finding.reason}; owner {finding.owner}; {finding.remedy})"


def odd_lines(odd: Sequence[OddMachine]) -> list[str]:
    """The facts that differ between machines, one line each."""
    return [
        f"differs: {entry.fact} {entry.value} on {listed(entry.machines, FINDINGS_SHOWN)}"
        + (f", {entry.usual} elsewhere" if entry.usual else "")
        for entry in odd
    ]


def _since(report: MachineReport, finding: Finding) -> str:
    return text.duration(max(report.now_ns - finding.since_ns, 0) / 1e9) if finding.since_ns else text.DASH


def _use(report: MachineReport) -> str:
    """The use of a machine, such as ``active gpt``; a dash if it is not known."""
    if not report.place:
        return text.DASH
    return f"{report.place} {report.job}" if report.place == PoolPlace.ACTIVE else report.place


def _style(verdict: Health) -> str:
    return VERDICT_STYLE.get(verdict, "yellow")
