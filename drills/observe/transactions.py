"""Finds the events of a history that Temporal wrote in one transaction; no worker can die between two of them.

Temporal's API does not show transactions, but the store of the local server does: each row of its table
``history_node`` has the events that one transaction added to a history. The table's form is that of version 1.31 of
the server: the id of a history's tree is the id of its run, and the column ``txn_id`` has the negated number of the
transaction.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from uuid import UUID

from temporalio.api.enums.v1 import EventType
from temporalio.api.history.v1 import History, HistoryEvent

Node = tuple[int, int, int, bytes]
"""A row: number of its first event, its transaction, the previous transaction of this history, its events."""


def begins(database: Path, run_id: str) -> list[int]:
    """Return, for each event of a run's history in order, the number of the first event in its transaction.

    Raises:
        LookupError: the store does not have the beginning of that history.
    """
    with closing(sqlite3.connect(f"{database.resolve().as_uri()}?mode=ro", uri=True)) as store:
        nodes = store.execute(
            "SELECT node_id, -txn_id, prev_txn_id, data FROM history_node WHERE tree_id = ?", (UUID(run_id).bytes,)
        ).fetchall()
    found: list[int] = []
    for _, _, _, data in _chain(nodes):
        events = History.FromString(data).events
        if not events or events[0].event_id != len(found) + 1:
            break
        found += [len(found) + 1] * len(events)
    if not found:
        raise LookupError(f"{database}: no history of run {run_id}, or its beginning is missing")
    return found


def since(events: list[HistoryEvent], transactions: list[int], newest: int) -> int:
    """Return the earliest event such that no worker did anything between it and the event ``newest``.

    It is the first event of the transaction with ``newest``. If that event is a workflow task that the server scheduled
    by itself, as it does for a child workflow, it is the first event of the transaction before that one.
    """
    first = transactions[newest - 1]
    while first > 1 and events[first - 1].event_type == EventType.EVENT_TYPE_WORKFLOW_TASK_SCHEDULED:
        first = transactions[first - 2]
    return first


def _chain(nodes: Iterable[Node]) -> list[Node]:
    """Return the rows from the first transaction to the last, without those that a repeated write left behind."""
    by_transaction = {node[1]: node for node in nodes}
    if not by_transaction:
        return []
    chain = [max(by_transaction.values(), key=lambda node: (node[0], node[1]))]
    while chain[-1][2] in by_transaction:
        chain.append(by_transaction[chain[-1][2]])
    return chain[::-1]
