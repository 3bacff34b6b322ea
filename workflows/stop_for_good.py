"""The orderly end of a job that is stopped."""

from __future__ import annotations

import contextlib

from temporalio import workflow
from temporalio.exceptions import ActivityError

with workflow.unsafe.imports_passed_through():
    from activities.agents.stop_ranks import StopRanks
    from everstep.base.text import listed
    from everstep.model.job_state import JobState
    from workflows.start_activity import start_activity


async def stop_for_good(state: JobState) -> str:
    """Stop all ranks, with the policy's time to end; returns what could not be reached, as text."""
    why, grace_s = f"stop asked for by {state.stop_requested}", state.spec.policy.stop.grace_s
    with contextlib.suppress(ActivityError):  # the release ends the rest
        evidence = await start_activity(
            StopRanks(job=state.placed, generation=state.generation, why=why, grace_s=grace_s, patience_s=5.0)
        )
        if evidence.unreachable:
            silent = listed(evidence.unreachable, 3)
            return f"; {silent} did not answer: ranks may live there, and are ended once it does"
    return ""
