"""What is left of the state of a job that has ended, for people."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from controlplane.queries.checkpoints import ask_for_copies, report_of
from everstep.decisions.keep.starts import left_by_earlier_run
from everstep.errors import AgentError

if TYPE_CHECKING:
    from controlplane.client import Control
    from everstep.model.job_state import JobState

PATIENCE_S = 3.0
"""Disks that have not been listed by then are not waited for; remote storage takes longer and is not asked."""


async def remaining_checkpoint(control: Control, state: JobState) -> str:
    """The newest step on disk that the job can go on from; its memory was given back."""
    see = f"everstep checkpoints {state.spec.name}{control.option}"
    checkpoint = state.spec.checkpoint.model_copy(update={"remote_url": ""})
    disks = state.spec.model_copy(update={"checkpoint": checkpoint})
    try:
        async with asyncio.timeout(PATIENCE_S):
            held, silent = await ask_for_copies(control.agents, disks, state.machines)
    except (AgentError, TimeoutError):
        return f"not known: the machines did not answer ({see})"
    report = report_of(disks, state.machines, left_by_earlier_run(held, state.spec.topology()), silent)
    unknown = bool(silent or report.unlisted)
    if report.restorable:
        text = f"step {report.restorable[0]} on disk"
    else:
        text = "no step of all ranks that can be seen on disk" if unknown else "no step of all ranks on disk"
    remote = f", and what is at {state.spec.checkpoint.remote_url}" if state.spec.checkpoint.remote_url else ""
    return f"{text}{remote}; its memory was given back ({see})"
