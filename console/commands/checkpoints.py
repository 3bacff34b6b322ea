"""``everstep checkpoints``: show which steps of a job are saved, where, and which of them every rank can restore."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from console.commands.shared import ClusterOption, JsonOption, finish
from console.terminal import PlainConsole
from everstep.base.text import listed

if TYPE_CHECKING:
    from rich.table import Table

    from controlplane.queries.checkpoints import CheckpointsReport, StepCopies
    from controlplane.queries.saved import SavedReport

NAMED = 8
"""At most this many ranks, machines or damaged copies are listed by name; the rest are counted."""
HEADINGS = {"own memory": "Own", "backup": "Backup", "disk": "Disk", "remote": "Remote"}


def checkpoints(
    job: Annotated[str, typer.Argument(help="Name of the job; it may be parked or have ended.")],
    verify: Annotated[bool, typer.Option("--verify", help="Read every byte and compare checksums.")] = False,
    cluster: ClusterOption = "default",
    as_json: JsonOption = False,
) -> None:
    """Show the checkpoints of a job: their steps, age and location, and whether every rank can restore them.

    Own is the memory of the machine that runs a rank, and Backup is the memory of its peer. 8/8 means that copies of 8
    of 8 ranks are there. When a job ends, its memory is freed, and the copies on disk and on remote storage stay.
    Copies that could not be listed are unknown, and do not count as damaged.

    While a job runs, some ranks may be missing in its oldest step in memory, since a newer step is replacing that step.

    Examples:

        everstep checkpoints gpt

        everstep checkpoints gpt --verify

        everstep checkpoints gpt --json | jq .restorable

        everstep run gpt.toml --resume-from 120

    Exit codes: 0 shown; 1 with --verify: a copy is damaged; 2 no such job; 3 no cluster or no Temporal.
    """
    finish(_checkpoints(job, cluster, verify=verify, as_json=as_json))


async def _checkpoints(job: str, cluster: str, *, verify: bool, as_json: bool) -> int:
    from controlplane.client import Control
    from controlplane.queries.checkpoints import ask_for_copies, report_of
    from controlplane.queries.status import saved_of
    from everstep.decisions.keep.lineage import UNKNOWN, Runs
    from everstep.decisions.keep.starts import left_by_earlier_run

    async with await Control.connect(cluster) as control:
        run = await control.run_of(job)
        state = await control.state(job)
        held, silent = await ask_for_copies(control.agents, state.spec, state.machines, verify=verify)
        report = report_of(
            state.spec,
            state.machines,
            held if run.running else left_by_earlier_run(held, state.spec.topology()),
            silent,
            lineage=state.lineage if run.running else (),
            runs=Runs(state.run, tuple(state.origin_runs)) if run.running else UNKNOWN,
            stepping=run.running and state.status != "parked",
        )
        saved = await saved_of(control, state) if run.running else None
    if as_json:
        print(report.model_dump_json(indent=2))
    else:
        console = PlainConsole()
        if report.steps:
            console.print(table(report, time.time_ns()))
        for line in lines(report, saved, ended=not run.running):
            console.print(line, soft_wrap=True)
    return 1 if verify and report.damaged else 0


def table(report: CheckpointsReport, now_ns: int) -> Table:
    """A table of the steps, newest first; tiers without copies have no column."""
    from rich.table import Table

    from controlplane import text
    from everstep.model.state_copy import Tier

    shown = Table(box=None, pad_edge=False)
    tiers = [tier for tier in Tier if any(step.ranks.get(tier) for step in report.steps)]
    shown.add_column("Step", justify="right", no_wrap=True)
    shown.add_column("Age", justify="right", no_wrap=True)
    shown.add_column("Restorable")
    for tier in tiers:
        shown.add_column(HEADINGS[tier], justify="right", no_wrap=True)
    shown.add_column("Bytes", justify="right", no_wrap=True)
    for step in report.steps:
        age = text.duration(max(now_ns - step.saved_ns, 0) / 1e9) if step.saved_ns else text.DASH
        counts = [f"{step.ranks.get(tier, 0)}/{report.world_size}" for tier in tiers]
        shown.add_row(str(step.step), age, _restorable(step), *counts, text.size(step.state_bytes))
    return shown


def _restorable(step: StepCopies) -> str:
    if step.restorable:
        return "yes"
    return f"no: rank {listed(step.missing, NAMED)} is missing"


def lines(report: CheckpointsReport, saved: SavedReport | None, *, ended: bool = False) -> list[str]:
    """The lines below the table."""
    from everstep.model.state_copy import count_of

    texts = []
    if not report.steps and (report.unlisted or report.silent):
        texts.append(f"no checkpoint of job {report.job} was found, but not every location could be listed")
    elif not report.steps:
        why = ": it has ended, and has no copy on disk or on remote storage" if ended else ""
        texts.append(f"job {report.job} has no checkpoint{why}")
    if not ended:  # an ended job has no backups
        machines = f"{pairs(report.backup_machines)}: " if report.backup_machines else ""
        texts.append(f"backups   {machines}{report.backups}")
    if saved and saved.backup_lag is not None:
        texts.append(f"lag       the slowest backup is {saved.backup_lag} steps behind own memory")
    texts += [f"problem   {line}" for line in (saved.problems if saved else [])]
    for copy in report.damaged[:NAMED]:
        step = f", step {copy.completed_steps}" if copy.completed_steps >= 0 else ""
        ranks, machines = listed([*copy.ranks], NAMED), listed([*copy.places], NAMED)
        texts.append(f"damaged   rank {ranks} on {machines}, {copy.tier}{step}: {copy.reason}")
    if len(report.damaged) > NAMED:
        texts.append(f"damaged   … and {count_of(report.damaged[NAMED:])} more copies")
    if report.unfinished:
        texts.append(
            f"unfinished {report.unfinished} files on remote storage, being uploaded or cut off; they are not used"
        )
    for reason, machines in unlisted(report).items():
        texts.append(f"unknown   {reason} (seen from {machines})")
    if report.disowned:
        texts.append(f"left out  {report.disowned} copies of steps that the job has abandoned")
    if report.silent:
        texts.append(f"no answer {', '.join(report.silent)}: their copies are not shown")
    return texts


def unlisted(report: CheckpointsReport) -> dict[str, str]:
    """The reasons why locations could not be listed, each with the machines that report it."""
    machines_of: dict[str, list[str]] = {}
    for location in report.unlisted:
        machines_of.setdefault(location.reason, []).extend(location.places)
    return {reason: listed(names, NAMED) for reason, names in machines_of.items()}


def pairs(machines: dict[str, str]) -> str:
    """The machines of backups: ``m0 <-> m3, m1 <-> m2``; ``m0 -> m1`` if m1 does not back up to m0."""
    texts = []
    for machine, to in machines.items():
        mutual = machines.get(to) == machine
        if not mutual:
            texts.append(f"{machine} -> {to}")
        elif f"{to} <-> {machine}" not in texts:
            texts.append(f"{machine} <-> {to}")
    return listed(texts, NAMED)
