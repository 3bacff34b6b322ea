"""Queries a workflow until its answer is as wanted."""

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
"""A workflow whose history grew at this number of looks in a row is queried although it still grows."""
LATE = (RPCStatusCode.CANCELLED, RPCStatusCode.DEADLINE_EXCEEDED)
"""On a busy computer no worker replayed the history in time: it is asked again."""


async def asked(
    handle: WorkflowHandle[Any, Any], query: str, ok: Callable[[Any], bool], kind: type | None = None
) -> Any:
    """Ask a workflow until it answers as wanted; the test's time-out bounds it.

    Each answer replays the history from the start, so it is asked again only once the server has more of it and two
    looks in turn find the same. What is wanted may depend on more than the answer, e.g. on what activities were called:
    while the history stands still, each look tries it on the same answer again.
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
