"""Scheduling of threads that move much data while a training step runs."""

from __future__ import annotations

import contextlib
import os


def yield_the_core() -> None:
    """Let the calling thread not preempt the thread that runs on its core when it wakes (SCHED_BATCH, sched(7)).

    Threads that copy and send call this. They keep their share of the processor; but on a machine without an idle core,
    they no longer interrupt a training step for some milliseconds as soon as it gives them work. Where a container
    forbids the change, nothing happens.
    """
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
