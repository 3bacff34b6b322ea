"""``everstep up``, ``everstep down`` and ``everstep doctor``: the local cluster."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Annotated

import typer

JOBS_PATIENCE_S = 30.0
"""`down` waits this many seconds for jobs to end in order."""

Name = Annotated[str, typer.Option("--cluster", metavar="NAME", help="Name of the cluster.")]


def _say(line: str) -> None:
    print(f"  {line}", file=sys.stderr, flush=True)


def up(  # noqa: PLR0917
    machines: Annotated[int, typer.Option(min=1, max=200, help="Machines for jobs.")] = 4,
    standbys: Annotated[int, typer.Option(min=0, max=50, help="Machines beside them, for replacement.")] = 1,
    at_most: Annotated[
        int,
        typer.Option(
            min=0, max=250, help="Start more machines by itself where there are too few, up to so many in all."
        ),
    ] = 0,
    workers: Annotated[int, typer.Option(min=1, max=16, help="Worker processes; two survive the death of one.")] = 2,
    cluster: Name = "default",
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
        typer.Option(metavar="FILE", envvar="EVERSTEP_NOTICES", help="Who is told of events: docs/guides/notices.md."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print addresses and folders as JSON.")] = False,
) -> None:
    """Start a local cluster: Temporal with its Web UI, workers, and one agent per machine.

    Everything runs detached, below a supervisor that starts again what dies. Idempotent: a running cluster stays as it
    is, and grows when more is asked for. Addresses, history and ledger are kept until `everstep down --purge`.

    Temporal is the server that you configured (TEMPORAL_ADDRESS or Temporal's profile file), else `temporal` on PATH,
    else a copy that is downloaded or built once.

    Examples:

        everstep up

        everstep up --machines 8 --standbys 2

        everstep up --machines 4 --standbys 1 --at-most 8

        everstep up --monitor monitor.toml --notices notices.toml

        EVERSTEP_HOME=/scratch/me everstep up --cluster try --json

    Exit codes: 0 everything answers; 1 something does not (its log is named); 2 wrong usage.
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
        progress=_say,
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
    print(f"Next: everstep run{option} --help; everstep down{option} ends it.")


def down(
    cluster: Name = "default",
    purge: Annotated[bool, typer.Option("--purge", help="Remove history, ledger and logs as well.")] = False,
    keep_jobs: Annotated[
        bool, typer.Option("--keep-jobs", help="Do not stop running jobs: the next `up` starts them again.")
    ] = False,
) -> None:
    """Stop a local cluster: its jobs, workers, agents, Temporal; give back the shared memory.

    Only what belongs to this cluster is touched. History, ledger and logs stay, and so do the addresses, for the next
    `everstep up`. Running jobs are stopped for good. With --keep-jobs they go on after the next `up`, but without the
    checkpoints that they kept in shared memory: from those on disk.

    Examples:

        everstep down

        everstep down --cluster try --purge

    Exit codes: 0 nothing of it runs any more (also when nothing ran); 1 a process cannot be stopped.
    """
    from controlplane.local import cluster as local

    if not keep_jobs:
        _stop_jobs(cluster)
    stopped = local.down(cluster, progress=_say, purge=purge)
    print(f"cluster {cluster} is down" if stopped else f"cluster {cluster} was not up")


def _stop_jobs(cluster: str) -> None:
    """Stop the jobs of a cluster that answers; a cluster that does not answer is taken down without this."""
    from controlplane.client import Control
    from controlplane.local.cluster_file import ClusterFile
    from everstep.errors import EverstepError

    async def stop() -> None:
        machines = ClusterFile.load(cluster).machines
        async with await Control.connect(cluster, local=True) as control:
            ours = [
                run.name
                for run in await control.jobs()
                if run.running and set((await control.state(run.name)).machines) <= set(machines)
            ]
            for name in ours:
                _say(f"stopping job {name}")
                await control.stop(name, "the cluster is taken down")
            await asyncio.gather(*(control.result(name) for name in ours), return_exceptions=True)

    async def stop_in_time() -> None:
        async with asyncio.timeout(JOBS_PATIENCE_S):
            await stop()

    try:
        asyncio.run(stop_in_time())
    except (EverstepError, TimeoutError) as error:
        if ClusterFile.path_of(cluster).exists():
            _say(f"running jobs could not be asked to stop ({error or 'no answer in time'}): their ranks are killed")


def doctor(
    inventory: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Ask the machines of a deployed cluster too; also as EVERSTEP_INVENTORY."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as a JSON list.")] = False,
) -> None:
    """Say what everstep needs on this machine, what is missing and how to get it.

    Looks at Python, torch, Temporal, shared memory, pidfd, addresses and ports,
    disk, Go, py-spy and PostgreSQL. Changes nothing.

    Examples:

        everstep doctor

        everstep doctor --inventory machines.toml

        everstep doctor --json

    Exit codes: 0 all that is needed is there; 1 something needed is missing.
    """
    from rich.table import Table

    from console.terminal import PlainConsole, styled
    from controlplane.inventory import inventory_path
    from controlplane.local.doctor import examine

    findings = examine(inventory_path(inventory))
    missing = [finding.name for finding in findings if finding.status == "missing"]
    if as_json:
        print(json.dumps([finding.model_dump() for finding in findings], indent=2))
        raise typer.Exit(1 if missing else 0)
    table = Table(box=None, pad_edge=False, show_header=False)
    colors = {"ok": "green", "missing": "red", "optional": "yellow"}
    for finding in findings:
        remedy = "" if finding.status == "ok" else f"\n→ {finding.remedy}"
        table.add_row(styled(finding.status, colors[finding.status]), finding.name, finding.found + remedy)
    PlainConsole(soft_wrap=not sys.stdout.isatty()).print(table)
    print(f"missing: {', '.join(missing)}" if missing else "everything that is needed is there")
    raise typer.Exit(1 if missing else 0)
