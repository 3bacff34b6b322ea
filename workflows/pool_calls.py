"""What workflows ask of the pool of machines: each activity with its input, its bounds and its line in the timeline.

The pool is a workflow of its own (``workflows.pool``), which a workflow cannot send an update to: activities do so.
"""

from __future__ import annotations

from collections.abc import Awaitable
from datetime import timedelta
from typing import Any

from temporalio import workflow
from temporalio.workflow import ActivityHandle

with workflow.unsafe.imports_passed_through():
    from activities import messages
    from activities.messages import AwaitStandbysInput
    from everstep.base.text import listed
    from everstep.model.job import JobSpec
    from everstep.model.machine import Machine
    from everstep.model.pool import GiveBack, Leased, LeaseRequest, Replaced, ReplaceRequest
    from workflows import activity_calls, web_ui
    from workflows.options import FAST_RETRY, HEARTBEAT_TIMEOUT, on_ranks

POOL_S = 15.0
"""A pool that does not answer for so long holds up no incident, and no end of a job."""


def lease(request: LeaseRequest) -> ActivityHandle[Leased]:
    """Ask for the machines of a job that starts. A pool that does not answer is waited for: no two jobs share any."""
    return workflow.start_activity(
        messages.POOL_LEASE,
        request,
        result_type=Leased,
        summary=web_ui.summary(listed([machine.name for machine in request.machines])),
        start_to_close_timeout=timedelta(minutes=1),
        heartbeat_timeout=HEARTBEAT_TIMEOUT,
        retry_policy=FAST_RETRY,
    )


def replace(request: ReplaceRequest) -> ActivityHandle[Replaced]:
    """Ask for machines in the places of those that are to leave a job."""
    return workflow.start_activity(
        messages.POOL_REPLACE,
        request,
        result_type=Replaced,
        summary=web_ui.summary(listed([f"{one.machine} ({one.reason})" for one in request.evict], 4)),
        **_bounds(),
    )


def give_back(request: GiveBack) -> ActivityHandle[int]:
    """Say that a job has left machines; returns how many it had."""
    return workflow.start_activity(
        messages.POOL_GIVE_BACK, request, result_type=int, summary=web_ui.summary(request.job), **_bounds()
    )


def leave(spec: JobSpec, machines: list[Machine], run: str) -> Awaitable[None]:
    """Give back all that a job has: what it holds on its machines, and then the machines."""
    released = activity_calls.release(spec, machines, run)

    async def give_machines_back() -> None:
        try:
            await released
        finally:
            await give_back(GiveBack(job=spec.name, run=run))

    return give_machines_back()


def await_standbys(count: int, patience: timedelta) -> ActivityHandle[int]:
    """Wait until there are so many machines to spare; returns how many there are."""
    return workflow.start_activity(
        messages.POOL_AWAIT,
        AwaitStandbysInput(count=count, patience_s=patience.total_seconds()),
        result_type=int,
        summary=web_ui.summary(f"{count} to spare"),
        **on_ranks(patience + timedelta(minutes=1)),
    )


def _bounds() -> dict[str, Any]:
    return {
        "start_to_close_timeout": timedelta(seconds=POOL_S),
        "schedule_to_close_timeout": timedelta(seconds=POOL_S),
        "heartbeat_timeout": HEARTBEAT_TIMEOUT,
        "retry_policy": FAST_RETRY,
    }
