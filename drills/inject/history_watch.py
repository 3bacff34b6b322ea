"""Watches a workflow's history from outside, and kills a worker as soon as an event is durable.

For a local server it reads the server's store, since a read takes ten microseconds: the table ``executions`` has the
number of the next event. Any other server is queried. A separate process watches, since workers and drills are busy for
milliseconds at a time: ``python -m drills.inject.history_watch``, with a ``HistoryWatch`` as JSON on standard input.
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

READ_S, QUERY_S = 0.0003, 0.004
"""Time between two reads of a store, and between two queries of a server, seconds."""
WORKER = "worker-0"
"""Name of the worker process that is killed."""
ENDS_S = 5.0
"""The watching process ends within this time after SIGTERM, seconds."""


class HistoryWatch(BaseModel):
    """The workflow to watch, and the worker to kill."""

    store: Path
    """Store of a local server; if this file does not exist, the server is queried."""
    address: str
    namespace: str
    workflow_id: str
    worker: int
    """Pid of the worker."""
    plan: Path
    fault: dict[str, Any]
    """The entry of the plan; its ``at_event`` is the number of the event."""

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Watch in another process until the block ends."""
        watching = subprocess.Popen(
            [sys.executable, "-P", "-m", "drills.inject.history_watch"], stdin=subprocess.PIPE, start_new_session=True
        )
        try:
            assert watching.stdin
            with contextlib.suppress(BrokenPipeError), watching.stdin:
                watching.stdin.write(self.model_dump_json().encode())
            yield
        finally:
            watching.terminate()
            watching.wait(ENDS_S)


@contextlib.contextmanager
def watched(context: DrillContext) -> Iterator[None]:
    """If the plan kills the first worker at an event, watch that workflow's history while the block runs; otherwise do
    nothing.

    Raises:
        ClusterError: the first worker does not run.
    """
    cluster = context.cluster
    fault = next((entry for entry in context.planned.workers if "at_event" in entry), None)
    if fault is None:
        yield
        return
    worker = cluster.processes().get(WORKER)
    if worker is None:
        raise ClusterError(f"{WORKER} does not run, so it cannot be killed at event {fault['at_event']}")
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


def watch_and_kill(watch: HistoryWatch) -> None:
    """Kill the worker once the event is durable; return early if the worker was killed in another way."""
    try:
        worker = os.pidfd_open(watch.worker)
    except ProcessLookupError:  # it was killed in another way before this process was ready
        return
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, worker)
        if watch.store.exists():
            connection = sqlite3.connect(f"{watch.store.as_uri()}?mode=ro", uri=True)
            store = stack.enter_context(contextlib.closing(connection))
            newest, pause_s = _newest_in_store(store, watch.workflow_id), READ_S
        else:
            newest, pause_s = _newest_on_server(stack.enter_context(asyncio.Runner()), watch), QUERY_S
        while faults.fired(watch.plan, watch.fault) is None:
            if (number := newest()) >= watch.fault["at_event"]:
                with contextlib.suppress(ProcessLookupError):  # the worker is dead, and its mark written
                    signal.pidfd_send_signal(worker, signal.SIGKILL)
                    faults.claim(watch.plan, watch.fault, place="seen in the history", newest=number, pid=watch.worker)
                return
            time.sleep(pause_s)


def _newest_in_store(store: sqlite3.Connection, workflow_id: str) -> Callable[[], int]:
    """Return a function that reads the number of the newest event; 0: there is no such workflow yet."""
    row: list[Any] = []

    def newest() -> int:
        if not row:
            current = "SELECT shard_id, namespace_id, workflow_id, run_id FROM current_executions WHERE workflow_id = ?"
            row.extend(store.execute(current, (workflow_id,)).fetchone() or ())
        key = "shard_id = ? AND namespace_id = ? AND workflow_id = ? AND run_id = ?"
        result = row and store.execute(f"SELECT next_event_id FROM executions WHERE {key}", row).fetchone()
        return int(result[0]) - 1 if result else 0

    return newest


def _newest_on_server(runner: asyncio.Runner, watch: HistoryWatch) -> Callable[[], int]:
    """Return a function that queries the number of the newest event; 0: there is no such workflow yet."""
    client = runner.run(Client.connect(watch.address, namespace=watch.namespace))

    async def described() -> int:
        try:
            return (await client.get_workflow_handle(watch.workflow_id).describe()).history_length
        except RPCError:
            return 0

    return lambda: runner.run(described())


if __name__ == "__main__":
    watch_and_kill(HistoryWatch.model_validate_json(sys.stdin.read()))
