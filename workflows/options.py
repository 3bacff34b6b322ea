"""Time-outs and retries of activities, in one place.

The values decide how long a dead worker delays an incident; they were measured
on Temporal 1.31 and are ours (docs/architecture.md, "How long a dead part delays
an incident").
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from temporalio.common import RetryPolicy

TASK_TIMEOUT = timedelta(seconds=3)
"""A worker that dies within a workflow task delays it this long; Temporal's default is 10 s."""
STICKY_TIMEOUT = timedelta(seconds=1)
"""A cached workflow of a dead worker moves on after this long; Temporal's default is 10 s."""
HEARTBEAT_TIMEOUT = timedelta(seconds=2)
"""An activity of a dead worker is tried elsewhere after this long."""
HEARTBEAT_THROTTLE = timedelta(milliseconds=300)

FAST_RETRY = RetryPolicy(
    initial_interval=timedelta(milliseconds=100), backoff_coefficient=2.0, maximum_interval=timedelta(seconds=5)
)


def on_ranks(total: timedelta) -> dict[str, Any]:
    """Options of an activity on ranks: heartbeats, quick retries, bounded as a whole."""
    return {
        "start_to_close_timeout": total,
        "schedule_to_close_timeout": total * 2,
        "heartbeat_timeout": HEARTBEAT_TIMEOUT,
        "retry_policy": FAST_RETRY,
    }


def on_ledger_when_back() -> dict[str, Any]:
    """Options of a write into a ledger that is away: nothing waits for it, so it is tried for an hour."""
    return on_ledger() | {
        "schedule_to_close_timeout": timedelta(hours=1),
        "retry_policy": RetryPolicy(initial_interval=timedelta(seconds=1), maximum_interval=timedelta(seconds=30)),
    }


def on_ledger() -> dict[str, Any]:
    """Options of a write into the ledger: tried for half a minute, then the job goes on without it."""
    return {
        "start_to_close_timeout": timedelta(seconds=20),
        "schedule_to_close_timeout": timedelta(seconds=30),
        "heartbeat_timeout": HEARTBEAT_TIMEOUT,
        "retry_policy": FAST_RETRY,
    }
