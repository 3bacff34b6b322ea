"""``everstep worker``: run a worker of the control plane."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Annotated

import typer

from everstep.errors import ConfigError
from everstep.model.job_state import TASK_QUEUE
from everstep.model.retention import Retention
from everstep.rank import environment


def worker(  # noqa: PLR0917
    ledger: Annotated[
        str, typer.Option(envvar="EVERSTEP_LEDGER_URL", help="sqlite:////path/ledger.db or postgresql+psycopg://…")
    ] = "",
    task_queue: Annotated[
        str,
        typer.Option(envvar=environment.TASK_QUEUE, help="Task queue of this cluster's jobs; commands need the same."),
    ] = TASK_QUEUE,
    metrics: Annotated[
        str, typer.Option(help="Serve /metrics for Prometheus on host:port: docs/reference/metrics.md.")
    ] = "",
    temporal_metrics: Annotated[
        str, typer.Option(help="Serve the metrics of Temporal's SDK on host:port; use another port than --metrics.")
    ] = "",
    notices: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            envvar=environment.NOTICES,
            help="Receivers of notices about events: docs/guides/notices.md.",
        ),
    ] = None,
    versions: Annotated[
        str,
        typer.Option(
            metavar="URL",
            envvar=environment.VERSIONS,
            help="Store of code versions: a folder, or s3://bucket/versions; commands need the same.",
        ),
    ] = "",
    ledger_days: Annotated[
        float,
        typer.Option(
            envvar=environment.LEDGER_DAYS,
            min=1,
            help="Days for which the ledger keeps the details of closed incidents, and the events of machines.",
        ),
    ] = Retention().days,
    ledger_gib: Annotated[
        float,
        typer.Option(
            envvar=environment.LEDGER_GIB,
            min=0.01,
            help="Size of a ledger in SQLite, GiB; above it, the oldest details are deleted earlier.",
        ),
    ] = Retention().gib,
    log_format: Annotated[
        str, typer.Option(envvar="EVERSTEP_LOG_FORMAT", help="Format of the log: text or json. Default: text.")
    ] = "",
) -> None:
    """Run a worker: workflows, activities and a watcher.

    A worker keeps no state: run two or more, and any of them may be killed. Temporal's address, namespace and TLS come
    from Temporal's own settings: TEMPORAL_ADDRESS, TEMPORAL_NAMESPACE, TEMPORAL_TLS_…, or its profile file.

    Workers delete details from the ledger that are older than --ledger-days, or too many for --ledger-gib. Open
    incidents, the times for the ETTR, and everything of the last day stay. 'everstep doctor' shows what was deleted.

    Example: TEMPORAL_ADDRESS=temporal:7233 everstep worker --ledger postgresql+psycopg://everstep@db/everstep
    """
    from controlplane.logging_setup import configure
    from controlplane.worker import run_worker
    from drills.inject import control_plane

    if not ledger:
        raise ConfigError(
            "a worker needs a ledger: give --ledger or set EVERSTEP_LEDGER_URL, e.g. sqlite:////var/lib/everstep/ledger.db"
        )
    configure("worker", json=log_format == "json" if log_format else None)
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    asyncio.run(
        run_worker(
            ledger_url=ledger,
            task_queue=task_queue,
            plugins=control_plane.plugins(),
            metrics=metrics,
            temporal_metrics=temporal_metrics,
            notices=notices,
            versions=versions,
            retention=Retention(days=ledger_days, gib=ledger_gib),
        )
    )
