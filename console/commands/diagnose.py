"""``everstep diagnose``: run diagnostic tests on machines that no job has."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from controlplane.client import Control
    from everstep.model.diagnosis import Diagnosis
    from everstep.model.machine import Machine

EXIT_UNKNOWN = 4
SAID_S = 1.0
"""Shortest time between two lines of progress, seconds."""
TIMED = ("memory", "bitwise")
"""Tests that repeat until a set time is over."""


def diagnose(  # noqa: PLR0917
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[MACHINE]...", help="By default all without job.")
    ] = None,
    tests: Annotated[str, typer.Option(metavar="TEST,TEST", help="Run these; by default all.")] = "",
    seconds: Annotated[
        float | None, typer.Option(metavar="N", min=0.0, help="How long memory and bitwise are repeated, each.")
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="TEST.NAME=VALUE", help="A setting of a test; repeatable.")
    ] = None,
    cluster: Annotated[str, typer.Option("--cluster", metavar="NAME", help="Local cluster.")] = "default",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: every result of every machine.")] = False,
) -> None:
    """Run diagnostic tests on machines that no job has, and say what they say together.

    Each machine is tested alone, all at once: DCGM and EUD where they are installed, memory, disk, copies to GPUs,
    loopback, all-to-all, and bitwise alignment, a small model whose bits all machines of a kind have to agree on. Then
    neighbours are tested in pairs: a machine that fails with two others is at fault, and so is a link between two
    machines that work with others.

    A test that cannot be run is unknown, and no fault. Machines that a job has are left
    out; one that is named is refused. A job that starts meanwhile ends the tests.

    Tests, settings and reason codes: docs/concepts/diagnostic-tests.md.

    Examples:

        everstep diagnose

        everstep diagnose m2 m3 m4 --tests bitwise --seconds 60

        everstep diagnose --tests memory,disk --set disk.mb=2048

        everstep diagnose --json | jq '.machines[] | select(.verdict == "faulty") | .machine'

    Exit codes: 0 all healthy; 1 a machine or a link is faulty; 2 wrong usage; 3 no
    cluster; 4 none is faulty, and some could not be judged.
    """
    from console.commands.exit_codes import finish

    finish(_diagnose(names or [], tests, seconds, set_ or [], cluster, as_json=as_json))


async def _diagnose(
    names: list[str], tests: str, seconds: float | None, changes: list[str], cluster: str, *, as_json: bool
) -> int:
    from activities.agents.diagnose_machines import DiagnoseMachines, Diagnosing
    from agent.diagnoser.all import known_tests, limits_named
    from controlplane.client import Control
    from everstep.model.finding import Health

    wanted = [name.strip() for name in tests.split(",") if name.strip()] or list(known_tests())
    settings = settings_of(wanted, seconds, changes)
    limit_s = sum(limits_named(name, json.dumps(settings.get(name, {}))).deadline_s for name in wanted)
    progress = Progress()
    async with await Control.connect(cluster) as control:
        machines = await _idle(control, names)
        given = DiagnoseMachines(machines=machines, tests=wanted, settings=settings, limit_s=limit_s, patience_s=5.0)
        found = await Diagnosing(control.agents, given, "", progress.say).run()
    if as_json:
        print(json.dumps({"verdict": found.verdict, **found.model_dump(mode="json")}, indent=2))
    else:
        _show(found)
    return {Health.HEALTHY: 0, Health.FAULTY: 1}.get(found.verdict, EXIT_UNKNOWN)


def settings_of(tests: Sequence[str], seconds: float | None, changes: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Parse the settings of tests from the command line.

    Raises:
        ConfigError: a setting does not belong to any test that runs.
    """
    from everstep.errors import ConfigError

    found: dict[str, dict[str, Any]] = {test: {} for test in tests}
    if seconds is not None:
        for test in TIMED:
            # A test that is repeated for longer may take longer.
            if test in found:
                found[test] |= {"seconds": max(seconds, 0.001), "deadline_s": 60.0 + 2 * seconds}
    for change in changes:
        name, equals, value = change.partition("=")
        test, dot, setting = name.partition(".")
        if not (equals and dot) or test not in found:
            raise ConfigError(f"--set {change}: write TEST.NAME=VALUE, with a test that is run: {', '.join(found)}")
        try:
            found[test][setting] = json.loads(value)
        except ValueError:
            found[test][setting] = value
    return {test: some for test, some in found.items() if some}


async def _idle(control: Control, names: list[str]) -> list[Machine]:
    """The machines with these names, or by default all machines that no job has.

    Raises:
        ConfigError: there is no such machine, a job has it, or no machine is left.
    """
    from controlplane.machine_pool import pool_state
    from everstep.base.text import listed
    from everstep.errors import ConfigError
    from everstep.model.pool import PoolPlace

    known = {machine.name: machine for machine in control.all_machines}
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"there is no machine {listed(unknown, 5)}; there are {listed(sorted(known), 20)}")
    pool = await pool_state(control)
    places = pool.machines if pool else {}
    taken = {name: one.job for name, one in places.items() if one.place is PoolPlace.ACTIVE}
    if refused := [f"{name} has the job {taken[name]}" for name in names if name in taken]:
        raise ConfigError(f"{listed(refused)}: tests take what ranks need. Stop the job, or name other machines")
    left = [known[name] for name in names or known if name not in taken]
    if not left:
        raise ConfigError(f"jobs have all machines: {listed([f'{name} {job}' for name, job in taken.items()])}")
    if out := [name for name in known if name in taken and not names]:
        print(f"left out, for jobs have them: {listed(out)}", file=sys.stderr)
    return left


class Progress:
    """Prints the progress of tests on the terminal from time to time."""

    def __init__(self) -> None:
        self._said_s, self._said = 0.0, ""

    def say(self, text: str) -> None:
        """Print the progress if it has changed and the last line is more than ``SAID_S`` old."""
        if text != self._said and time.monotonic() - self._said_s >= SAID_S:
            self._said_s, self._said = time.monotonic(), text
            print(text, file=sys.stderr)


def _show(found: Diagnosis) -> None:
    from console.terminal import PlainConsole, together
    from console.views.diagnosis import diagnosis_table, link_lines, measured_table

    shown = together(diagnosis_table(found), *link_lines(found), "", measured_table(found))
    PlainConsole().print(shown, soft_wrap=False)
    print(f"\n{found.verdict}: {len(found.machines)} machines, {', '.join(found.tests)}, in {found.seconds:.1f} s")
