"""``everstep up``, ``down`` and ``doctor``: start, stop and check a local cluster."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from console.commands.shared import ClusterOption, LedgerOption, known_cluster, port_range
from everstep.base.addresses import Ports
from everstep.errors import EverstepError

JOBS_PATIENCE_S = 30.0
"""`down` waits this long for running jobs to end, seconds."""


def _show(line: str) -> None:
    print(f"  {line}", file=sys.stderr, flush=True)


def up(  # noqa: PLR0917
    machines: Annotated[int, typer.Option(min=1, max=200, help="Number of machines for jobs.")] = 4,
    standbys: Annotated[int, typer.Option(min=0, max=50, help="Number of additional machines, for replacement.")] = 1,
    at_most: Annotated[
        int,
        typer.Option(
            min=0,
            max=250,
            help="If there are too few machines, the cluster starts more by itself, up to this number in all.",
        ),
    ] = 0,
    workers: Annotated[
        int,
        typer.Option(min=1, max=16, help="Number of worker processes; with two, the cluster survives a crash of one."),
    ] = 2,
    cluster: ClusterOption = "default",
    monitor: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            envvar="EVERSTEP_MONITOR",
            help="Settings of the agents' inspections: docs/concepts/inspections.md.",
        ),
    ] = None,
    notices: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", envvar="EVERSTEP_NOTICES", help="Receivers of notices about events: docs/guides/notices.md."
        ),
    ] = None,
    ports: Annotated[
        Ports | None,
        typer.Option(
            parser=port_range,
            metavar="FIRST-LAST",
            help="Ports of the agents and of their data ports. Default: those of the last start, or 20000-31999 for "
            "agents and any for data ports.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print addresses and folders as JSON.")] = False,
) -> None:
    """Start a local cluster: Temporal with its Web UI, workers, and one agent per machine.

    All processes run in the background, under a supervisor that restarts them when they die. If the cluster is running
    already, it stays as it is, or grows to the requested size. Addresses, history and ledger are kept until
    `everstep down --purge`.

    The Temporal server is the one that you configured (TEMPORAL_ADDRESS or Temporal's profile file), or else `temporal`
    on PATH, or else a copy that is downloaded or built once.

    Examples:

        everstep up

        everstep up --machines 8 --standbys 2

        everstep up --machines 4 --standbys 1 --at-most 8

        everstep up --monitor monitor.toml --notices notices.toml

        EVERSTEP_HOME=/scratch/me everstep up --cluster try --json

    Exit codes: 0 all processes answer; 1 a process does not answer (the message names its log); 2 wrong usage.
    """
    from controlplane.local import cluster as local

    running = local.up(
        cluster,
        machines=machines,
        standbys=standbys,
        at_most=at_most,
        workers=workers,
        monitor=monitor,
        notices=notices,
        port_range=ports,
        progress=_show,
    )
    if as_json:
        print(running.model_dump_json(indent=2))
        return
    active = len(running.machines) - running.standbys
    print(f"cluster {cluster} is up: {active} machines, {running.standbys} standbys, {running.workers} workers")
    print(f"  Temporal  {running.temporal_address}, namespace {running.namespace}")
    if running.ui_url:
        print(f"  Web UI    {running.ui_url}/namespaces/{running.namespace}/workflows")
    print(f"  logs      {running.home / 'logs'}")
    option = "" if cluster == "default" else f" --cluster {cluster}"
    print(f"Next: 'everstep run{option} --help' shows how to run a job; 'everstep down{option}' stops the cluster.")


def down(
    cluster: ClusterOption = "default",
    purge: Annotated[bool, typer.Option("--purge", help="Remove history, ledger and logs as well.")] = False,
    keep_jobs: Annotated[
        bool, typer.Option("--keep-jobs", help="Do not end running jobs: they continue after the next `up`.")
    ] = False,
) -> None:
    """Stop a local cluster: its jobs, workers, agents and Temporal; free its shared memory.

    No process and no file of another cluster is touched. History, ledger, logs and addresses stay for the next
    `everstep up`. Running jobs are stopped for good. With --keep-jobs they continue after the next `up`, from their
    checkpoints on disk, since the checkpoints in shared memory are lost.

    Examples:

        everstep down

        everstep down --cluster try --purge

    Exit codes: 0 no process of the cluster runs (also if none ran before); 1 a process cannot be stopped.
    """
    from controlplane.local import cluster as local

    if not keep_jobs:
        _stop_jobs(cluster)
    stopped = local.down(cluster, progress=_show, purge=purge)
    print(f"cluster {cluster} is down" if stopped else f"cluster {cluster} was not up")


def _stop_jobs(cluster: str) -> None:
    """Stop the jobs of a cluster. If the cluster does not answer, the ranks are killed later, with the cluster."""
    from controlplane.client import Control
    from controlplane.local.cluster_file import ClusterFile

    async def stop() -> None:
        machines = ClusterFile.load(cluster).machines
        async with asyncio.timeout(JOBS_PATIENCE_S), await Control.connect(cluster, local=True) as control:
            names = [
                run.name
                for run in await control.jobs()
                if run.running and set((await control.state(run.name)).machines) <= set(machines)
            ]
            for name in names:
                _show(f"stopping job {name}")
                await control.stop(name, "the cluster is taken down")
            await asyncio.gather(*(control.result(name) for name in names), return_exceptions=True)

    try:
        asyncio.run(stop())
    except (EverstepError, TimeoutError) as error:
        if ClusterFile.path_of(cluster).exists():
            _show(f"running jobs did not stop in order ({error or 'no answer in time'}): their ranks are killed")


def doctor(
    inventory: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Also check the machines of a deployed cluster. Default: those of EVERSTEP_INVENTORY."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as a JSON list.")] = False,
    ledger: LedgerOption = "",
    cluster: ClusterOption = "default",
) -> None:
    """Show what everstep needs on this computer and on the cluster's machines, what is missing, and how to get it.

    The command checks Python, torch, Temporal, shared memory, pidfd, addresses and ports, disk, Go, py-spy and
    PostgreSQL on this computer. It reads the whole ledger too, which takes seconds for each GB, and says if its file is
    damaged. It changes nothing.

    With an inventory, every agent also checks its own rights and limits, e.g. whether it may read the kernel log and
    the stacks of ranks, its network, GPUs and clock, and whether it reaches the agent of the next machine in the list.
    If something is missing, the command shows the line to add to the unit, to docker run or to the pod. Machines with
    equal answers share a line.

    Examples:

        everstep doctor

        everstep doctor --inventory machines.toml

        everstep doctor --json

    Exit codes: 0 all required parts are there; 1 a required part is missing.
    """
    from rich.table import Table

    from console.terminal import PlainConsole, styled
    from controlplane.doctor import examine
    from controlplane.inventory import inventory_path

    described = known_cluster(cluster)
    results = examine(inventory_path(inventory), ledger or (described.ledger_url if described else ""))
    missing = list(dict.fromkeys(result.name for result in results if result.status == "missing"))
    if as_json:
        print(json.dumps([result.model_dump() for result in results], indent=2))
        raise typer.Exit(1 if missing else 0)
    table = Table(box=None, pad_edge=False, show_header=False)
    colors = {"ok": "green", "missing": "red", "optional": "yellow", "unknown": "yellow"}
    for result in results:
        remedy = "" if result.status == "ok" or not result.remedy else f"\n→ {result.remedy}"
        table.add_row(styled(result.status, colors[result.status]), result.name, result.found + remedy)
    PlainConsole(soft_wrap=not sys.stdout.isatty()).print(table)
    print(f"missing: {', '.join(missing)}" if missing else "all required parts are there")
    raise typer.Exit(1 if missing else 0)
