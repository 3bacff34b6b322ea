"""Time-outs of workers and workflow tasks; those of activities are in the activities (``activities/activity.py``)."""

from __future__ import annotations

from datetime import timedelta

TASK_TIMEOUT = timedelta(seconds=3)
"""A worker that dies within a workflow task delays it this long; Temporal's default is 10 s."""
STICKY_TIMEOUT = timedelta(seconds=1)
"""A cached workflow of a dead worker moves to another after this time; Temporal's default is 10 s."""
HEARTBEAT_THROTTLE = timedelta(milliseconds=300)
"""The shortest time between two heartbeats of an activity that are sent."""
