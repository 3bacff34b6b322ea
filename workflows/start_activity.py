"""Starts activities from workflows, with the settings of their classes; has the time-outs of workers and workflow
tasks."""

from __future__ import annotations

from datetime import timedelta
from typing import TypeVar

from temporalio import workflow
from temporalio.workflow import ActivityHandle

with workflow.unsafe.imports_passed_through():
    from activities.activity import HEARTBEAT_TIMEOUT, Activity, Bounds
    from workflows.web_ui import summary

Result = TypeVar("Result")

TASK_TIMEOUT = timedelta(seconds=3)
"""A worker that dies within a workflow task delays it this long; Temporal's default is 10 s."""
STICKY_TIMEOUT = timedelta(seconds=1)
"""A cached workflow of a dead worker moves to another worker after this time; Temporal's default is 10 s."""
HEARTBEAT_THROTTLE = timedelta(milliseconds=300)
"""The shortest time between two heartbeats that a worker sends for an activity."""


def start_activity(request: Activity[Result], bounds: Bounds | None = None) -> ActivityHandle[Result]:
    """Start an activity; ``bounds`` replace the activity's own."""
    bounds = bounds or request.bounds()
    return workflow.start_activity(
        request.name,
        request,
        result_type=request.result_type(),
        summary=summary(request.line()),
        start_to_close_timeout=bounds.attempt,
        schedule_to_close_timeout=bounds.total,
        heartbeat_timeout=HEARTBEAT_TIMEOUT,
        retry_policy=bounds.retry,
    )
