"""Starts activities from workflows: an activity's class has all that a workflow needs, except the code."""

from __future__ import annotations

from typing import TypeVar

from temporalio import workflow
from temporalio.workflow import ActivityHandle

with workflow.unsafe.imports_passed_through():
    from activities.activity import HEARTBEAT_TIMEOUT, Activity, Bounds
    from workflows.web_ui import summary

Result = TypeVar("Result")


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
