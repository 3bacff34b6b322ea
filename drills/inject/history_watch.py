"""Watches a workflow's history from outside, and kills a worker as soon as an event is durable.

For a local server it reads the store: the table ``executions`` has the number of the next event, and a read takes ten
microseconds. Any other server is queried. A separate process does this, since workers and drills have other work, which
may take milliseconds.

Run as ``python -m drills.inject.history_watch`` with a ``HistoryWatch`` as JSON on standard input.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel
from temporalio.client import Client
from temporalio.service import RPCError

from everstep.errors import ClusterError
from everstep.rank import drill_faults as faults

if TYPE_CHECKING:
    from drills.inject.context import DrillContext

LOOK_S, ASK_S = 0.0003, 0.004
"""Time between two reads of a store, and between two queries, seconds."""
WORKER = "worker-0"
"""Name of the worker process that is killed."""
ENDS_S = 5.0
"""Time for the watching process to end after SIGTERM, seconds."""


class HistoryWatch(BaseModel):
    """The workflow to watch, and the worker to kill."""

    store: Path
    """Store of a local server; else the server is queried."""
    address: str
    namespace: str
    workflow_id: str
    worker: int
    """Pid of the worker."""
    plan: Path
    fault: dict[str, Any]
    """The entry of the plan, with ``at_event``."""

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Watch in another process until the block ends."""
        looking = subprocess.Popen(
            [sys.executable, "-P", "-m", "drills.inject.history_watch"], stdin=subprocess.PIPE, start_new_session=True
        )
        try:
            assert looking.stdin
            with contextlib.suppress(BrokenPipeError), looking.stdin:
                looking.stdin.write(self.model_dump_json().encode())
            yield
        finally:
            looking.terminate()
            looking.wait(ENDS_S)


@contextlib.contextmanager
def watched(context: DrillContext) -> Iterator[None]:
    """While a drill runs, watch the history whose event kills the first worker; other faults need no watch.

    Raises:
        ClusterError: that worker does not run.
    """
    cluster = context.cluster
    fault = next((one for one in context.planned.workers if "at_event" in one), None)
    if fault is None:
        yield
        return
    worker = cluster.processes().get(WORKER)
    if worker is None:
        raise ClusterError(f"{WORKER} does not run: nothing can kill it at event {fault['at_event']}")
    watch = HistoryWatch(
        store=cluster.file.database,
        address=cluster.file.temporal_address,
        namespace=cluster.file.namespace,
        workflow_id=fault["workflow_id"],
        worker=worker,
        plan=cluster.worker_plan,
        fault=fault,
    )
    with watch.running():
        yield


def look(asked: HistoryWatch) -> None:
    """Watch until the event is durable, and kill the worker; or until another place has killed it."""
    worker = os.pidfd_open(asked.worker)
    with contextlib.ExitStack() as held:
        held.callback(os.close, worker)
        if asked.store.exists():
            store = held.enter_context(contextlib.closing(sqlite3.connect(f"{asked.store.as_uri()}?mode=ro", uri=True)))
            newest, pause_s = _of_store(store, asked.workflow_id), LOOK_S
        else:
            newest, pause_s = _of_server(held.enter_context(asyncio.Runner()), asked), ASK_S
        while faults.fired(asked.plan, asked.fault) is None:
            if (number := newest()) >= asked.fault["at_event"]:
                with contextlib.suppress(ProcessLookupError):  # another place killed it, and left a mark
                    signal.pidfd_send_signal(worker, signal.SIGKILL)
                    faults.claim(asked.plan, asked.fault, place="seen in the history", newest=number, pid=asked.worker)
                return
            time.sleep(pause_s)


def _of_store(store: sqlite3.Connection, workflow_id: str) -> Callable[[], int]:
    """The number of the newest event in the server's store; 0: there is no such workflow yet."""
    row: list[Any] = []

    def newest() -> int:
        if not row:
            found = "SELECT shard_id, namespace_id, workflow_id, run_id FROM current_executions WHERE workflow_id = ?"
            row.extend(store.execute(found, (workflow_id,)).fetchone() or ())
        key = "shard_id = ? AND namespace_id = ? AND workflow_id = ? AND run_id = ?"
        said = row and store.execute(f"SELECT next_event_id FROM executions WHERE {key}", row).fetchone()
        return int(said[0]) - 1 if said else 0

    return newest


def _of_server(runner: asyncio.Runner, asked: HistoryWatch) -> Callable[[], int]:
    """The number of the newest event, by a query of the server; 0: there is no such workflow yet."""
    client = runner.run(Client.connect(asked.address, namespace=asked.namespace))

    async def described() -> int:
        try:
            return (await client.get_workflow_handle(asked.workflow_id).describe()).history_length
        except RPCError:
            return 0

    return lambda: runner.run(described())


if __name__ == "__main__":
    look(HistoryWatch.model_validate_json(sys.stdin.read()))
