"""Waiting for an inspection to find what a drill broke."""

from __future__ import annotations

import asyncio
import contextlib
import time

from drills.inject.context import LOOK_S, DrillContext
from drills.spec.findings import expected_of
from everstep.errors import AgentError, ClusterError

FOUND_LIMIT_S = 60.0
"""An inspection has found what is broken within this long; the longest default period is 30 s (ours)."""


async def await_finding(context: DrillContext) -> None:
    """Wait until the agent of the struck machine has found it, and note when.

    Raises:
        ClusterError: it does not.
    """
    expected = expected_of(context.request)
    assert expected is not None
    deadline = time.monotonic() + FOUND_LIMIT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(AgentError):
            reply = await context.cluster.control.agents.get(context.target.address).inspect(timeout_s=1.0)
            if any(found.reason == expected.reason for state in reply.inspections for found in state.findings):
                context.seen.found_ns = time.time_ns()
                return
        await asyncio.sleep(LOOK_S)
    raise ClusterError(f"the agent of {context.target.name} did not find {expected.reason} within {FOUND_LIMIT_S:g} s")
