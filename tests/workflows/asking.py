"""Asking a workflow until it answers as wanted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from temporalio.client import WorkflowHandle

ASK_S = 0.1
"""Between two looks at a workflow."""


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
        if now != before and ok(answer := await handle.query(query, result_type=kind)):
            return answer
        before = now
        await asyncio.sleep(ASK_S)
