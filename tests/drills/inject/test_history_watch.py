"""A drill kills a worker when an event appears in the Temporal server's database. Here the test fills the database."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

from drills.inject.history_watch import HistoryWatch
from everstep.rank import drill_faults as faults

TABLES = """
CREATE TABLE current_executions (shard_id INT, namespace_id BINARY(16), workflow_id VARCHAR(255), run_id BINARY(16));
CREATE TABLE executions (shard_id INT, namespace_id BINARY(16), workflow_id VARCHAR(255), run_id BINARY(16),
    next_event_id BIGINT);
"""
KEY = (1, b"namespace", "replay/gpt/0001-1", b"run")


def test_a_worker_is_killed_only_when_the_event_is_in_the_database(tmp_path: Path) -> None:
    path, plan, fault = tmp_path / "temporal.db", tmp_path / "plan.json", {"id": "f", "at_event": 3}
    worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    with closing(sqlite3.connect(path, isolation_level=None)) as store:
        store.execute("PRAGMA journal_mode=WAL")
        store.executescript(TABLES)
        given = {"store": path, "address": "", "namespace": "", "workflow_id": KEY[2], "worker": worker.pid}
        with HistoryWatch.model_validate({**given, "plan": plan, "fault": fault}).running():
            store.execute("INSERT INTO current_executions VALUES (?, ?, ?, ?)", KEY)
            store.execute("INSERT INTO executions VALUES (?, ?, ?, ?, 3)", KEY)
            time.sleep(2)
            assert worker.poll() is None, "the newest event is 2, and the worker dies only at event 3"
            store.execute("UPDATE executions SET next_event_id = 5")
            assert worker.wait(30) == -signal.SIGKILL
            while (mark := faults.fired(plan, fault)) is None:
                time.sleep(0.01)
    assert (mark["place"], mark["newest"], mark["pid"]) == ("seen in the history", 4, worker.pid)
