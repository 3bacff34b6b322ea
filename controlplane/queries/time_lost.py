"""The unproductive time of a job by cause: since its start, and in the last hour."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import BaseModel

from controlplane import text
from everstep.decisions.training_time.ettr import WINDOW_S, Ettr
from everstep.decisions.training_time.time_lost import Cause
from everstep.errors import EverstepError
from everstep.model.job_state import JobState
from everstep.model.stage import Stage

if TYPE_CHECKING:  # These modules import Temporal's client, which is slow, and which the ledger does not need.
    from controlplane.client import Control
    from controlplane.progress import JobProgress

ORDER: tuple[Cause, ...] = ("start", "detect", "decide", "evict", "restart", "recompute", "parked", "unknown")
"""The causes of unproductive time, in the order of an incident."""
LEAST_S = 0.005
"""Shorter times are not shown, seconds."""


class TimeLost(BaseModel):
    """Unproductive seconds of a job by cause, in the order of ``ORDER``."""

    since_start: dict[Cause, float]
    last_hour: dict[Cause, float] | None = None
    """Seconds by cause within the last hour; None: the job does not run."""


@dataclass(frozen=True, slots=True)
class JobTime:
    """How a job spent its time."""

    ettr: Ettr
    ettr_last_hour: Ettr | None
    """ETTR of the last hour; None: the job does not run."""
    lost: TimeLost


async def lost_of(control: Control, state: JobState, progress: JobProgress, *, running: bool) -> JobTime | None:
    """How a job spent its time, from ledger and agents; None: the ledger does not have the job.

    Args:
        control: Connection to the cluster.
        state: State of the job.
        progress: Progress of its ranks, since time without steps is not productive.
        running: Whether the job runs.
    """
    ledger = await control.ledger()
    if ledger is None:
        return None
    now_ns = time.time_ns()
    begins = (None, now_ns - round(WINDOW_S * 1e9)) if running else (None,)
    parked = {one.id: one.stage == Stage.PARKED for one in state.incidents if not one.resolution}
    with suppress(EverstepError):
        spent = await ledger.call(
            type(ledger).time_spent,
            state.spec.name,
            now_ns=now_ns,
            since_ns=begins,
            quiet_since_ns=progress.quiet_since_ns,
            parked=parked,
        )
        if not spent:
            return None
        hour = spent[1] if running else None
        lost = TimeLost(since_start=_lost(spent[0].causes), last_hour=_lost(hour.causes) if hour else None)
        return JobTime(spent[0].ettr, hour.ettr if hour else None, lost)
    return None


def _lost(causes: dict[Cause, float]) -> dict[Cause, float]:
    return {cause: causes[cause] for cause in ORDER}


def causes_text(seconds: dict[Cause, float]) -> str:
    """The causes with their times, such as ``detect 0.40 s, restart 8.10 s``; causes without time are left out."""
    parts = [f"{cause} {text.duration(seconds[cause])}" for cause in ORDER if seconds.get(cause, 0.0) >= LEAST_S]
    return ", ".join(parts) or "nothing"


def lost_text(lost: TimeLost) -> str:
    """The causes since the start, and those of the last hour if they differ."""
    since_start = causes_text(lost.since_start)
    hour = since_start if lost.last_hour is None else causes_text(lost.last_hour)
    return since_start if hour == since_start else f"{since_start}; in the last hour: {hour}"
