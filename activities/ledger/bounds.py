"""The time limits of writes into the ledger."""

from __future__ import annotations

from datetime import timedelta

from temporalio.common import RetryPolicy

from activities.activity import Bounds

ON_LEDGER = Bounds(timedelta(seconds=20), timedelta(seconds=30))
"""The write is retried for half a minute; then the job continues without it."""
ON_LEDGER_WHEN_BACK = Bounds(
    timedelta(seconds=20),
    timedelta(hours=1),
    RetryPolicy(initial_interval=timedelta(seconds=1), maximum_interval=timedelta(seconds=30)),
)
"""The write is retried for an hour, because no recovery waits for it and the ledger may be away."""
