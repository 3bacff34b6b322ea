"""Queries a workflow until its answer is the wanted one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from temporalio.client import WorkflowHandle
from temporalio.service import RPCError, RPCStatusCode

ASK_S = 0.05
"""The time between two questions, seconds."""
MOVING = 20
"""After its history grew at this number of looks in a row, a workflow is queried although its history still grows."""
LATE = (RPCStatusCode.CANCELLED, RPCStatusCode.DEADLINE_EXCEEDED)
"""On a busy computer, a worker may be too slow to replay the history in time. Then the workflow is queried again."""


async def asked(
    handle: WorkflowHandle[Any, Any], query: str, ok: Callable[[Any], bool], kind: type | None = None
) -> Any:
    """Query a workflow until the answer is the wanted one. The test's time-out limits the wait.

    For each answer, a worker replays the history from the start. So the workflow is queried again only once its history
    is longer, and is the same at two looks in a row. Whether an answer is the wanted one may also depend on other
    facts, for example on the called activities. So while the history does not change, each look checks the same answer
    again.
    """
    before = asked_at = answer = None
    moved = 0
    while True:
        there = await handle.describe()
        now = (there.run_id, there.history_length)
        moved = moved + 1 if now != before else 0
        before = now
        if now != asked_at and moved in {0, MOVING}:
            moved = 0
            with contextlib.suppress(Late):
                if ok(answer := await _once(handle, query, kind)):
                    return answer
                asked_at = now
        elif now == asked_at and ok(answer):
            return answer
        await asyncio.sleep(ASK_S)


class Late(Exception):
    """There was no answer in time."""


async def _once(handle: WorkflowHandle[Any, Any], query: str, kind: type | None) -> Any:
    try:
        return await handle.query(query, result_type=kind)
    except RPCError as error:
        if error.status in LATE:
            raise Late from error
        raise
