"""Asking a workflow until it answers as wanted."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from temporalio.client import WorkflowHandle
from temporalio.service import RPCError, RPCStatusCode

ASK_S = 0.1
"""Between two looks at a workflow."""
LATE = (RPCStatusCode.CANCELLED, RPCStatusCode.DEADLINE_EXCEEDED)
"""On a busy computer no worker replayed the history in time: it is asked again."""


async def asked(
    handle: WorkflowHandle[Any, Any], query: str, ok: Callable[[Any], bool], kind: type | None = None
) -> Any:
    """Ask a workflow until it answers as wanted; the test's time-out bounds it.

    Each answer replays the history from the start, so it is asked again only once the server has more of it.
    """
    before = None
    while True:
        there = await handle.describe()
        now = (there.run_id, there.history_length)
        with contextlib.suppress(Late):
            if now != before and ok(answer := await _once(handle, query, kind)):
                return answer
            before = now
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
