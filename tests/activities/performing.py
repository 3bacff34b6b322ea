"""Performs an activity as a worker does, with the tools that a test gives it."""

from __future__ import annotations

from typing import Any, TypeVar

from temporalio.testing import ActivityEnvironment

from activities.activity import Activity
from activities.registry import function
from activities.tools import Tools

Result = TypeVar("Result")


def tools(**parts: Any) -> Tools:
    """Return a worker's tools, with only the parts that a test needs."""
    return Tools(**{"agents": None, "ledger": None} | parts)


async def perform(request: Activity[Result], environment: ActivityEnvironment | None = None, **parts: Any) -> Result:
    """Return the result of an activity; ``parts`` are fields of :class:`Tools`."""
    performed = function(type(request), tools(**parts))
    result: Result = await (environment or ActivityEnvironment()).run(performed, request)
    return result
