"""Threads that move bulk data beside training."""

from __future__ import annotations

import contextlib
import os


def yield_the_core() -> None:
    """When the calling thread wakes, it does not preempt the thread that runs on its core.

    Called in threads that copy and send. They get the same share of the processor as before; but a step that hands
    them work goes on instead of losing some milliseconds to them at once, where no core is to spare (SCHED_BATCH,
    sched(7)). Nothing happens where a container forbids it.
    """
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
