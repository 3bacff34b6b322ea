"""Changes the scheduling of threads that move much data while a training step runs."""

from __future__ import annotations

import contextlib
import os


def yield_the_core() -> None:
    """When the calling thread wakes, it no longer preempts the thread that runs on its core (SCHED_BATCH, sched(7)).

    Threads that copy and send call this. They keep their share of the processor. But on a machine without an idle core,
    they no longer interrupt a training step for some milliseconds as soon as the step gives them work. If a container
    forbids the change, nothing happens.
    """
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
