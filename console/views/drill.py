"""The results of drills as text."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from console.terminal import PlainConsole, styled
from controlplane.shown import clean
from drills.faults.all import FAULTS, usage_of
from drills.judge.result import DrillResult
from drills.verdict import summary

SHOWN = 3
"""At most this many incidents are shown, each with a command."""
SOURCES = {"own memory": "their own memory", "backup": "backups", "disk": "disk", "remote": "remote storage"}


def progress(line: str) -> None:
    """Print one line of progress on standard error, so that the output of --json stays clean."""
    print(f"  {clean(line)}", file=sys.stderr, flush=True)


def each(result: DrillResult) -> None:
    """Print one line about a run that has ended."""
    progress(one_line(result))


def one_line(result: DrillResult) -> str:
    """The result of a run in one line."""
    verdict = "ok" if result.ok else "NOT OK"
    return (
        f"{result.job}: {verdict}, {_noticed_in(result)}, "
        f"steps lost: {_or(result.steps_lost)}, losses {_matches(result.losses_match)}"
    )


def catalogue(*, as_json: bool) -> None:
    """Print all faults, one line each."""
    if as_json:
        rows = [{"fault": fault.name, "options": usage_of(fault), "what": fault.summary} for fault in FAULTS]
        print(json.dumps(rows, indent=2))
        return
    width = max(len(fault.name) for fault in FAULTS)
    for fault in FAULTS:
        print(f"{fault.name:{width}}  {usage_of(fault):44}  {fault.summary}")


def results(runs: list[DrillResult]) -> None:
    """Print the results: one run with all details; several runs as a table with median, p90 and maximum."""
    out = PlainConsole()
    if len(runs) > 1:
        _runs(out, runs)
    for run in runs if len(runs) == 1 else [run for run in runs if not run.ok]:
        _report(out, run)
    for line in afterwards(runs):
        out.print(f"  {line}", soft_wrap=True)


def afterwards(runs: list[DrillResult]) -> list[str]:
    """Lines that show how to read the incidents: commands if the cluster was left up, or else the option that leaves it
    up."""
    incidents = [incident for run in runs for incident in run.incidents]
    cluster = next((run.cluster for run in runs if run.cluster), "")
    if not cluster:
        return ["the incidents were removed with the cluster: --keep leaves it up"] if incidents else []
    return commands(cluster, incidents, next(run.prefix for run in runs if run.cluster))


def commands(cluster: str, incidents: Sequence[str] = (), before: str = "") -> list[str]:
    """Commands that read the incidents of a cluster that was left up, and that take it down.

    Args:
        cluster: Folder of the cluster; empty: it was not left up, and there are no commands.
        incidents: Ids of the cluster's incidents; empty: one command lists them.
        before: Text before each command, such as variables.
    """
    if not cluster:
        return []
    home = Path(cluster)  # <EVERSTEP_HOME>/clusters/<name>
    prefix = f"{before}EVERSTEP_HOME={shlex.quote(str(home.parent.parent))} everstep"
    option = f"--cluster {home.name}"
    return [
        *(f"read it       {prefix} incident {incident} {option}" for incident in incidents[:SHOWN]),
        *([f"list all      {prefix} incidents {option}"] if not incidents or len(incidents) > SHOWN else []),
        f"take it down  {prefix} down {option} --purge",
    ]


def _report(out: PlainConsole, run: DrillResult) -> None:
    verdict = styled("as expected", "bold green") if run.ok else styled("NOT as expected", "bold red")
    out.print()
    out.print(styled(run.fault, "bold").append(f" ({run.job}): ", "not bold").append(verdict))
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 2))
    table.add_row("fault", "injected" if run.fired else styled("not injected", "red"))
    for row in _noticed(run):
        table.add_row(*row)
    if run.stages:
        table.add_row("stages", ", ".join(f"{name} {_s(seconds)}" for name, seconds in run.stages))
    if run.parts:
        table.add_row("first step", ", ".join(f"{name} {_s(seconds)}" for name, seconds in run.parts.items()))
    allowed = "" if run.steps_promised is None else f" of {run.steps_promised} at most: {run.promise}"
    table.add_row("steps lost", _or(run.steps_lost) + allowed)
    if run.damaged:
        table.add_row("damaged", "; ".join(run.damaged))
    if run.emptied:
        table.add_row("emptied", ", ".join(run.emptied))
    if run.restored_from:
        sources = [f"{ranks} from {SOURCES.get(tier, tier)}" for tier, ranks in run.restored_from.items()]
        table.add_row("restored", f"{sum(run.restored_from.values())} ranks: {', '.join(sources)}")
    if run.said:
        table.add_row("reported", "; ".join(run.said))
    if run.pace is not None:
        pace = f"while the agent hung, a step took {run.pace:.2f} times as long"
        table.add_row("pace", f"{pace}, and backups were up to {_or(run.lag)} steps behind")
    compared = f", {run.steps} steps" if run.losses_match is not None else ""
    table.add_row("losses", _matches(run.losses_match) + compared)
    table.add_row("last state", _matches(run.state_match))
    if run.not_compared:
        table.add_row("not compared", "; ".join(run.not_compared))
    twice = styled(f"{run.duplicates} ranks ran twice at the same time", "red")
    table.add_row("copies", "no rank ran twice at the same time" if not run.duplicates else twice)
    table.add_row("left behind", "nothing" if not run.leaked else styled(", ".join(run.leaked[:10]), "red"))
    table.add_row("ETTR", "unknown" if run.ettr is None else f"{run.ettr:.1%} of the job's time was productive")
    out.print(table)
    for link in run.links:
        out.print(f"  {link}")
    for problem in run.problems:
        out.print(styled("  problem", "red").append(f": {clean(problem)}", "default"))


def _noticed_in(run: DrillResult) -> str:
    if run.resolution == "observed":
        return f"reported after {_s(run.detected_s)}, and the job continued"
    return f"detected after {_s(run.detected_s)}, recovered after {_s(run.recovered_s)}"


def _noticed(run: DrillResult) -> list[tuple[str, str]]:
    """Rows with the times of detection and of recovery."""
    detected, recovered = f"{_s(run.detected_s)} after the fault", f"{_s(run.recovered_s)} after the fault"
    if run.resolution == "observed":
        where = ", ".join(run.incidents) or "in the ledger, without an incident"
        return [("reported", f"{detected}: {where}; the job continued")]
    back = "the part was back" if run.resolution == "absorbed" else "all ranks had completed a step again"
    rows = [("detected", f"{detected}: {', '.join(run.incidents)}")] if run.incidents else []
    return [*rows, ("recovered", f"{recovered} {back} ({run.resolution or 'no resolution'})")]


def _runs(out: PlainConsole, runs: list[DrillResult]) -> None:
    table = Table(box=None, pad_edge=False)
    for name in ("run", "verdict", "detected", "recovered", "lost steps", "losses"):
        table.add_column(name)
    for run in runs:
        verdict = "ok" if run.ok else styled("NOT OK", "red")
        table.add_row(
            run.job,
            verdict,
            _s(run.detected_s),
            _s(run.recovered_s),
            _or(run.steps_lost),
            _matches(run.losses_match).partition(" ")[0],
        )
    out.print(table)
    figures = summary(runs)
    for name, label in (("detected_s", "detected"), ("recovered_s", "recovered")):
        if times := figures[name]:
            out.print(f"{label}: median {times['median']:.3f} s, p90 {times['p90']:.3f} s, max {times['max']:.3f} s")
    out.print(f"{figures['ok']} of {figures['runs']} runs as expected")


def _s(seconds: float | None) -> str:
    return "unknown" if seconds is None else f"{seconds:.3f} s" if seconds < 10 else f"{seconds:.1f} s"


def _or(value: int | None) -> str:
    return "unknown" if value is None else str(value)


def _matches(value: bool | None) -> str:
    if value is None:
        return "not compared"
    return "equal bit for bit to the run without the fault" if value else "DIFFERENT"
