"""What one transaction added to a history, by a store that is filled by hand; by a server: test_control_plane."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from temporalio.api.enums.v1 import EventType
from temporalio.api.history.v1 import History, HistoryEvent, WorkflowExecutionStartedEventAttributes

from drills.observe import transactions

OURS, OTHER = "run-1", "run-2"
TABLE = """CREATE TABLE history_node (shard_id INT, tree_id BINARY(16), branch_id BINARY(16), node_id BIGINT,
    txn_id BIGINT, prev_txn_id BIGINT DEFAULT 0, data MEDIUMBLOB, data_encoding VARCHAR(16))"""
SCHEDULED = EventType.EVENT_TYPE_WORKFLOW_TASK_SCHEDULED
COMPLETED = EventType.EVENT_TYPE_WORKFLOW_TASK_COMPLETED


def events(first: int, count: int, run: str = OURS) -> bytes:
    found = [HistoryEvent(event_id=number) for number in range(first, first + count)]
    if first == 1:
        started = WorkflowExecutionStartedEventAttributes(original_execution_run_id=run)
        found[0].workflow_execution_started_event_attributes.CopyFrom(started)
    return History(events=found).SerializeToString()


def a_store(folder: Path, *rows: tuple[bytes, int, int, int, bytes]) -> Path:
    path = folder / "temporal.db"
    with closing(sqlite3.connect(path)) as store, store:
        store.execute(TABLE)
        for tree, node, txn, before, data in rows:
            store.execute(
                "INSERT INTO history_node VALUES (1, ?, ?, ?, ?, ?, ?, 'Proto3')", (tree, tree, node, txn, before, data)
            )
    return path


def test_each_row_of_the_run_is_a_transaction(tmp_path: Path) -> None:
    store = a_store(
        tmp_path,
        (b"b", 1, 5, 0, events(1, 4, OTHER)),
        (b"a", 1, 10, 0, events(1, 2)),
        (b"a", 3, 11, 10, events(3, 1)),
        (b"a", 4, 14, 11, events(4, 3)),
    )
    assert transactions.begins(store, OURS) == [1, 1, 3, 4, 4, 4]
    assert transactions.begins(store, OTHER) == [1, 1, 1, 1]


def test_a_write_that_was_tried_again_counts_once(tmp_path: Path) -> None:
    store = a_store(
        tmp_path,
        (b"a", 1, 10, 0, events(1, 2)),
        (b"a", 3, 11, 10, events(3, 4)),
        (b"a", 3, 12, 10, events(3, 1)),
        (b"a", 4, 13, 12, events(4, 1)),
    )
    assert transactions.begins(store, OURS) == [1, 1, 3, 4]


def test_a_history_whose_beginning_is_missing_is_unknown(tmp_path: Path) -> None:
    store = a_store(tmp_path, (b"a", 1, 10, 0, events(1, 2)), (b"a", 5, 13, 12, events(5, 1)))
    with pytest.raises(LookupError, match=r"temporal\.db: no history of run run-1"):
        transactions.begins(store, OURS)
    with pytest.raises(LookupError, match="no history of run run-3"):
        transactions.begins(store, "run-3")


@pytest.mark.parametrize(
    ("newest", "first"),
    [(1, 1), (2, 1), (3, 3), (5, 4), (6, 4), (7, 7)],
)
def test_a_task_that_the_server_adds_by_itself_is_no_doing_of_a_worker(newest: int, first: int) -> None:
    kinds = [0, SCHEDULED, 0, COMPLETED, 0, SCHEDULED, 0]
    found = [HistoryEvent(event_id=n, event_type=EventType.ValueType(kind)) for n, kind in enumerate(kinds, start=1)]
    assert transactions.since(found, [1, 2, 3, 4, 4, 6, 7], newest) == first
