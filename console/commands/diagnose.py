"""``everstep diagnose``: run diagnostic tests on machines that no job has."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from console.commands.machines import VERDICT_STYLE, machines_named
from console.commands.shared import EXIT_UNKNOWN, ClusterOption, finish
from console.terminal import PlainConsole, styled, together
from everstep.base.text import listed, size_text
from everstep.errors import ConfigError
from everstep.model.diagnosis import SPEED, Diagnosis, MachineDiagnosis, Measured
from everstep.model.finding import Health
from everstep.model.pool import PoolPlace

if TYPE_CHECKING:
    from controlplane.client import Control
    from everstep.model.machine import Machine

PROGRESS_S = 1.0
"""Shortest time between two lines of progress, seconds."""
TIMED = ("memory", "bitwise")
"""Tests that repeat until a set time is over."""
HEALTHY_SHOWN = 16
"""If there are more healthy machines than this, they are only counted."""
FINDINGS_SHOWN = 5
"""Number of findings that are shown for one machine."""


def diagnose(  # noqa: PLR0917
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[MACHINE]...", help="Default: all machines that no job has.")
    ] = None,
    tests: Annotated[str, typer.Option(metavar="TEST,TEST", help="Run these tests. Default: all tests.")] = "",
    seconds: Annotated[
        float | None,
        typer.Option(metavar="N", min=0.0, help="How long the tests memory and bitwise are repeated, each."),
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="TEST.NAME=VALUE", help="A setting of a test; repeatable.")
    ] = None,
    cluster: ClusterOption = "default",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: every result of every machine.")] = False,
) -> None:
    """Run diagnostic tests on machines that no job has, and judge each machine and link by all results together.

    Each machine is first tested alone, all machines at the same time: DCGM and EUD if they are installed, memory, disk,
    copies to GPUs, loopback, all-to-all, and bitwise alignment, which is a small model whose bits must be equal on all
    machines of a kind. After that, neighbours are tested in pairs. A machine that fails with two others is at fault.
    If two machines fail only with each other, their link is at fault.

    The result of a test that cannot be run is unknown, and not a fault. Machines that a job has are not tested; naming
    one of them is an error. If a job starts meanwhile, the tests end.

    Tests, settings and reason codes: docs/concepts/diagnostic-tests.md.

    Examples:

        everstep diagnose

        everstep diagnose m2 m3 m4 --tests bitwise --seconds 60

        everstep diagnose --tests memory,disk --set disk.mb=2048

        everstep diagnose --json | jq '.machines[] | select(.verdict == "faulty") | .machine'

    Exit codes: 0 all are healthy; 1 a machine or a link is faulty; 2 wrong usage; 3 no cluster; 4 no machine or link is
    faulty, but some could not be judged.
    """
    finish(_diagnose(names or [], tests, seconds, set_ or [], cluster, as_json=as_json))


async def _diagnose(
    names: list[str], tests: str, seconds: float | None, changes: list[str], cluster: str, *, as_json: bool
) -> int:
    from activities.agents.diagnose_machines import DiagnoseMachines, Diagnosing
    from agent.diagnoser.all import known_tests, limits_named
    from controlplane.client import Control

    wanted = [name.strip() for name in tests.split(",") if name.strip()] or list(known_tests())
    settings = settings_of(wanted, seconds, changes)
    limit_s = sum(limits_named(name, json.dumps(settings.get(name, {}))).deadline_s for name in wanted)
    async with await Control.connect(cluster) as control:
        machines = await _idle(control, names)
        request = DiagnoseMachines(machines=machines, tests=wanted, settings=settings, limit_s=limit_s, patience_s=5.0)
        diagnosis = await Diagnosing(control.agents, request, "", Progress().show).run()
    if as_json:
        print(json.dumps({"verdict": diagnosis.verdict, **diagnosis.model_dump(mode="json")}, indent=2))
    else:
        _show(diagnosis)
    return {Health.HEALTHY: 0, Health.FAULTY: 1}.get(diagnosis.verdict, EXIT_UNKNOWN)


def settings_of(tests: Sequence[str], seconds: float | None, changes: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Parse the settings of tests from the command line; returns test → its settings.

    Raises:
        ConfigError: a setting does not belong to any test that runs.
    """
    settings: dict[str, dict[str, Any]] = {test: {} for test in tests}
    if seconds is not None:
        for test in TIMED:
            # A test that is repeated for longer also has a later deadline.
            if test in settings:
                settings[test] |= {"seconds": max(seconds, 0.001), "deadline_s": 60.0 + 2 * seconds}
    for change in changes:
        name, equals, value = change.partition("=")
        test, dot, setting = name.partition(".")
        if not (equals and dot) or test not in settings:
            raise ConfigError(
                f"--set {change}: write TEST.NAME=VALUE, where TEST is one of the tests that run: {', '.join(settings)}"
            )
        try:
            settings[test][setting] = json.loads(value)
        except ValueError:
            settings[test][setting] = value
    return {test: own for test, own in settings.items() if own}


async def _idle(control: Control, names: list[str]) -> list[Machine]:
    """The machines with these names, or by default all machines that no job has.

    Raises:
        ConfigError: there is no such machine, a job has it, or no machine is left.
    """
    from controlplane.machine_pool import pool_state

    machines = machines_named(control, names)
    pool = await pool_state(control)
    slots = pool.machines if pool else {}
    job_of = {name: slot.job for name, slot in slots.items() if slot.place is PoolPlace.ACTIVE}
    if refused := [f"job {job_of[name]} has {name}" for name in names if name in job_of]:
        raise ConfigError(
            f"{listed(refused)}: tests use the memory and the devices that ranks need. Stop the job, or name other "
            "machines"
        )
    idle = [machine for machine in machines if machine.name not in job_of]
    if not idle:
        pairs = [f"{name} ({job})" for name, job in job_of.items()]
        raise ConfigError(f"jobs have all machines: {listed(pairs)}. Stop a job to test its machines")
    if busy := [machine.name for machine in machines if machine.name in job_of]:
        print(f"these machines are not tested, since jobs have them: {listed(busy)}", file=sys.stderr)
    return idle


class Progress:
    """Prints the progress of tests on the terminal from time to time."""

    def __init__(self) -> None:
        self._shown_s, self._shown = 0.0, ""

    def show(self, text: str) -> None:
        """Print the progress if it has changed and the last line is more than ``PROGRESS_S`` old."""
        if text != self._shown and time.monotonic() - self._shown_s >= PROGRESS_S:
            self._shown_s, self._shown = time.monotonic(), text
            print(text, file=sys.stderr)


def _show(diagnosis: Diagnosis) -> None:
    links = [f"faulty link: {' and '.join(link.machines)}, {link.test}: {link.text}" for link in diagnosis.links]
    shown = together(diagnosis_table(diagnosis), *links, "", measured_table(diagnosis))
    PlainConsole().print(shown, soft_wrap=False)
    tests = ", ".join(diagnosis.tests)
    print(f"\n{diagnosis.verdict}: {len(diagnosis.machines)} machines, {tests}, in {diagnosis.seconds:.1f} s")


def diagnosis_table(diagnosis: Diagnosis) -> Table:
    """A table of all machines, faulty machines first."""
    table = Table(box=None, pad_edge=False)
    for name in ("Machine", "Verdict"):
        table.add_column(name, no_wrap=True)
    table.add_column("What", overflow="fold")
    order = {Health.FAULTY: 0, Health.UNKNOWN: 1}
    shown = sorted(diagnosis.machines, key=lambda machine: order.get(machine.verdict, 2))
    healthy = [machine for machine in shown if machine.verdict is Health.HEALTHY]
    if len(healthy) > HEALTHY_SHOWN:
        shown = [machine for machine in shown if machine.verdict is not Health.HEALTHY]
    for machine in shown:
        for index, line in enumerate(list(_lines(machine)) or [""]):
            name, verdict = (machine.machine, str(machine.verdict)) if index == 0 else ("", "")
            table.add_row(name, styled(verdict, VERDICT_STYLE.get(machine.verdict, "yellow")), line)
    if len(healthy) > HEALTHY_SHOWN:
        table.add_row(f"{len(healthy)} others", styled("healthy", "green"), "")
    return table


def _lines(machine: MachineDiagnosis) -> Iterator[str]:
    for finding in machine.findings[:FINDINGS_SHOWN]:
        details = f"{finding.reason}; owner {finding.owner}; {finding.remedy}"
        yield f"{finding.inspection}: {finding.headline} ({details})"
    if len(machine.findings) > FINDINGS_SHOWN:
        yield f"and {len(machine.findings) - FINDINGS_SHOWN} more, with --json"
    if nothing := [f"{result.test}: {result.nothing}" for result in machine.results if result.nothing]:
        yield f"nothing to test: {listed(nothing)}"


def measured_table(diagnosis: Diagnosis) -> Table:
    """A table of all measured figures; a row covers all machines that have its figure."""
    table = Table(box=None, pad_edge=False)
    for name in ("Measured", "On", "Low", "Median", "High", "Lowest"):
        table.add_column(name, no_wrap=name != "Lowest")
    for measured in diagnosis.measured:
        values = [_figure(measured, value) for value in (measured.low, measured.median, measured.high)]
        table.add_row(measured.name, str(measured.machines), *values, measured.lowest)
    return table


def _figure(measured: Measured, value: float) -> str:
    name = measured.name.partition("{")[0]
    if name.endswith(SPEED):
        return f"{size_text(value)}/s"
    return size_text(value) if name.endswith("bytes") else f"{value:g}"
