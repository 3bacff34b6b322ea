"""``everstep machines``: which job has each machine, and the findings of inspections."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import RenderableType

    from controlplane.client import Control
    from controlplane.queries.machines import MachineReport
    from everstep.model.machine import Machine

WATCH_S = 1.0
"""Time between two polls of --watch, seconds."""


def machines(  # noqa: PLR0917
    names: Annotated[list[str] | None, typer.Argument(metavar="[MACHINE]...", help="Show these, in full.")] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Show it again every second, until Ctrl-C.")] = False,
    measures: Annotated[bool, typer.Option("--measures", help="With a machine: all that is measured as well.")] = False,
    clear: Annotated[
        str, typer.Option(metavar="REASON", help="You repaired it: what has this reason code begins anew.")
    ] = "",
    record: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Add what they say to a recording, until Ctrl-C.")
    ] = None,
    every: Annotated[float, typer.Option(metavar="SECONDS", min=0.1, help="With --record: between two looks.")] = 60.0,
    cluster: Annotated[str, typer.Option("--cluster", metavar="NAME", help="Local cluster.")] = "default",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, one entry for each machine.")] = False,
) -> None:
    """Show whose the machines are, and what their inspections say: healthy, faulty or unknown, why, what to do.

    A machine is active for a job, a standby, free, cordoned by an operator, or
    quarantined after an eviction. 'everstep evict' and 'everstep release' change that.

    Unknown is what could not be looked at, and what was seen that does not say whose fault it is. It is no fault of the
    machine. A machine whose agent does not answer is unknown.

    The machines are those of the local cluster, or of the inventory that EVERSTEP_INVENTORY names. Inspections, reason
    codes and settings: docs/concepts/inspections.md.

    What a line of the kernel log told counts until the machine is started anew, or for some time. What is compared with
    what was, as memory or a file system that was writable, is found as long as it is less. --clear ends that for the
    machines that are named: events count no more, what is compared begins with what is there now. The inspections look
    again, and it shows what they say.

    A recording has a line of JSON for each machine and look. `everstep policy
    simulate` says what a policy would have done about it.

    Examples:

        everstep machines

        everstep machines m2 --watch

        everstep machines m2 --clear xid-79

        everstep machines --record events.jsonl --every 30

        everstep machines --json | jq '.[] | select(.verdict == "faulty") | .machine'

    Exit codes: 0 shown; 1 nothing to clear; 2 no such machine; 3 no cluster.
    """
    from console.commands.exit_codes import finish

    if clear:
        finish(_clear(names or [], cluster, clear, as_json=as_json))
    if record is not None:
        finish(_record(names or [], cluster, record, every))
    finish(_machines(names or [], cluster, watch=watch, measures=measures, as_json=as_json))


async def _clear(names: list[str], cluster: str, reason: str, *, as_json: bool) -> int:
    from controlplane.client import Control
    from everstep.errors import ConfigError

    if not names:
        raise ConfigError(f"--clear {reason}: name the machines that were repaired")
    async with await Control.connect(cluster) as control:
        counts = {}
        for machine in _known(control, names):
            counts[machine.name] = (await control.agents.get(machine.address).clear(reason)).cleared
        reports = await _asked(control, names)
    if not as_json:
        for name, cleared in counts.items():
            print(f"{name}: {cleared} cleared" if cleared else f"{name}: nothing has reason code {reason} there")
    _show(reports, full=True, measures=False, as_json=as_json)
    return 0 if any(counts.values()) else 1


async def _record(names: list[str], cluster: str, path: Path, every_s: float) -> int:
    from controlplane.client import Control
    from controlplane.recording import MachineRecorder
    from everstep.errors import ConfigError

    recorder = MachineRecorder()
    async with await Control.connect(cluster) as control:
        machines = _known(control, names)
        print(f"recording {len(machines)} machines to {path}, every {every_s:g} s; Ctrl-C ends", file=sys.stderr)
        while True:
            asked_ns = time.time_ns()
            reports = await _asked(control, names)
            lines = recorder.lines(reports, asked_ns, time.time_ns())
            try:
                with path.open("a") as file:  # opened anew each time: the file may have been moved away
                    file.writelines(f"{line}\n" for line in lines)
            except OSError as error:
                raise ConfigError(f"the recording {path} cannot be written: {error.strerror or error}") from error
            await asyncio.sleep(every_s)


async def _machines(names: list[str], cluster: str, *, watch: bool, measures: bool, as_json: bool) -> int:
    from controlplane.client import Control

    async with await Control.connect(cluster) as control:
        if not watch:
            _show(await _asked(control, names), full=bool(names), measures=measures, as_json=as_json)
            return 0
        from rich.live import Live

        from console.terminal import PlainConsole

        with Live(console=PlainConsole(), auto_refresh=False, screen=False) as live:
            while True:
                live.update(_rendered(await _asked(control, names), full=bool(names), measures=measures), refresh=True)
                await asyncio.sleep(WATCH_S)


async def _asked(control: Control, names: list[str]) -> list[MachineReport]:
    from controlplane.machine_pool import pool_state
    from controlplane.queries.machines import ask_machines, with_places

    reports, pool = await asyncio.gather(ask_machines(control.agents, _known(control, names)), pool_state(control))
    return with_places(reports, pool)


def _known(control: Control, names: list[str]) -> list[Machine]:
    """The machines with these names, or by default all machines."""
    from everstep.base.text import listed
    from everstep.errors import ConfigError

    known = {machine.name: machine for machine in control.all_machines}
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"there is no machine {listed(unknown, 5)}; there are {listed(sorted(known), 20)}")
    return [known[name] for name in names or known]


def _rendered(reports: list[MachineReport], *, full: bool, measures: bool) -> RenderableType:
    from console.terminal import together
    from console.views.machines import machine_table, machines_table, measure_lines, odd_lines
    from controlplane.queries.machines import odd_ones

    if not full:
        return together(machines_table(reports), *odd_lines(odd_ones(reports)))
    parts: list[RenderableType] = []
    for report in reports:
        parts.append(f"{report.machine}  {report.address}  {report.verdict}  {report.problem}".rstrip())
        parts.append(machine_table(report))
        parts += measure_lines(report) if measures else []
    return together(*parts)


def _show(reports: list[MachineReport], *, full: bool, measures: bool, as_json: bool) -> None:
    if as_json:
        import json

        print(json.dumps([report.model_dump(mode="json") for report in reports], indent=2))
        return
    from console.terminal import PlainConsole

    PlainConsole().print(_rendered(reports, full=full, measures=measures), soft_wrap=False)
