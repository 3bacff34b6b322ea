"""Which events one transaction added to a history. Here a test fills the store; test_control_plane uses a real one."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from uuid import UUID

import pytest
from temporalio.api.enums.v1 import EventType
from temporalio.api.history.v1 import History, HistoryEvent

from drills.observe import transactions

OURS, OTHER, NONE = (str(UUID(int=number)) for number in (1, 2, 3))
TABLE = """CREATE TABLE history_node (shard_id INT, tree_id BINARY(16), branch_id BINARY(16), node_id BIGINT,
    txn_id BIGINT, prev_txn_id BIGINT DEFAULT 0, data MEDIUMBLOB, data_encoding VARCHAR(16))"""
SCHEDULED = EventType.EVENT_TYPE_WORKFLOW_TASK_SCHEDULED
COMPLETED = EventType.EVENT_TYPE_WORKFLOW_TASK_COMPLETED


def events(first: int, count: int) -> bytes:
    return History(events=[HistoryEvent(event_id=number) for number in range(first, first + count)]).SerializeToString()


def a_store(folder: Path, *rows: tuple[str, int, int, int, bytes]) -> Path:
    path = folder / "temporal.db"
    with closing(sqlite3.connect(path)) as store, store:
        store.execute(TABLE)
        for run, node, transaction, before, data in rows:
            values = (UUID(run).bytes, b"branch", node, -transaction, before, data)
            store.execute("INSERT INTO history_node VALUES (1, ?, ?, ?, ?, ?, ?, 'Proto3')", values)
    return path


def test_each_row_of_the_run_is_a_transaction(tmp_path: Path) -> None:
    store = a_store(
        tmp_path,
        (OTHER, 1, 5, 0, events(1, 4)),
        (OURS, 1, 10, 0, events(1, 2)),
        (OURS, 3, 11, 10, events(3, 1)),
        (OURS, 4, 14, 11, events(4, 3)),
    )
    assert transactions.begins(store, OURS) == [1, 1, 3, 4, 4, 4]
    assert transactions.begins(store, OTHER) == [1, 1, 1, 1]


def test_a_write_that_was_tried_again_counts_once(tmp_path: Path) -> None:
    store = a_store(
        tmp_path,
        (OURS, 1, 10, 0, events(1, 2)),
        (OURS, 3, 11, 10, events(3, 4)),
        (OURS, 3, 12, 10, events(3, 1)),
        (OURS, 4, 13, 12, events(4, 1)),
    )
    assert transactions.begins(store, OURS) == [1, 1, 3, 4]


def test_a_history_whose_beginning_is_missing_is_unknown(tmp_path: Path) -> None:
    store = a_store(tmp_path, (OURS, 1, 10, 0, events(1, 2)), (OURS, 5, 13, 12, events(5, 1)))
    with pytest.raises(LookupError, match=r"temporal\.db: no history of run 0+-0+-0+-0+-0+1"):
        transactions.begins(store, OURS)
    with pytest.raises(LookupError, match="no history of run"):
        transactions.begins(store, NONE)


@pytest.mark.parametrize(
    ("newest", "first"),
    [(1, 1), (2, 1), (3, 3), (5, 4), (6, 4), (7, 7)],
)
def test_a_task_that_the_server_adds_by_itself_is_no_doing_of_a_worker(newest: int, first: int) -> None:
    kinds = [0, SCHEDULED, 0, COMPLETED, 0, SCHEDULED, 0]
    found = [HistoryEvent(event_id=n, event_type=EventType.ValueType(kind)) for n, kind in enumerate(kinds, start=1)]
    assert transactions.since(found, [1, 2, 3, 4, 4, 6, 7], newest) == first
