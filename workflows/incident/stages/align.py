"""Align: before a stop that is not urgent, all ranks end the same step and save it, so that nothing is computed twice.

This happens before an update of the code, and before a machine whose ranks still step leaves the job. The ranks of such
a machine resume from their backups, which may be some steps behind without an alignment.
"""

from __future__ import annotations

from collections.abc import Sequence

from temporalio import workflow
from temporalio.exceptions import ActivityError

with workflow.unsafe.imports_passed_through():
    from activities.agents.align_ranks import AlignRanks
    from everstep.model.stage import Stage
    from workflows.incident.incident import Incident
    from workflows.start_activity import start_activity


async def align_before_leaving(incident: Incident) -> None:
    """Align the ranks before secured machines leave, and wait until their backups have the step."""
    secured, spec = incident.secured, incident.state.spec
    if secured is None:
        return
    names = {one.machine for one in secured.leaving}
    each = spec.assignment(incident.state.machines).each()
    ranks = [rank for machine, of_machine in each if machine.name in names for rank in of_machine]
    await align(incident, backed_up=ranks if spec.checkpoint.backup else [])


async def align(incident: Incident, *, backed_up: Sequence[int] = ()) -> None:
    """Align the ranks; the stop follows even if that fails.

    Args:
        incident: The incident.
        backed_up: Ranks whose backup must have the step too.
    """
    state, timeline = incident.state, incident.timeline
    if not state.spec.policy.stop.align_s:
        return
    began = timeline.enter(Stage.ALIGN)
    asked = start_activity(AlignRanks(job=state.placed, generation=state.generation, backed_up=list(backed_up)))
    try:
        aligned = await incident.unless_abandoned(asked)
    except ActivityError as error:
        timeline.leave(began, Stage.ALIGN, f"failed: {error.cause or error}")
        return
    timeline.leave(began, Stage.ALIGN, aligned.why or f"all ranks wait at step {aligned.step}")
