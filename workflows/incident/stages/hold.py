"""Hold: before an update all ranks come to the end of the same step, and save it: nothing is computed twice."""

from __future__ import annotations

from temporalio import workflow
from temporalio.exceptions import ActivityError

with workflow.unsafe.imports_passed_through():
    from everstep.model.incident import Stage
    from workflows import activity_calls
    from workflows.incident.incident import Incident


async def hold(incident: Incident) -> None:
    """Let the ranks end their step; whatever comes of it, the stop follows."""
    input, timeline = incident.input, incident.timeline
    if not input.spec.policy.hold_s:
        return
    began = timeline.enter(Stage.HOLD)
    try:
        held = await incident.unless_abandoned(activity_calls.hold(input.spec, input.machines, input.generation))
    except ActivityError as error:
        timeline.leave(began, Stage.HOLD, f"failed: {error.cause or error}")
        return
    timeline.leave(began, Stage.HOLD, held.why or f"all ranks wait at step {held.step}")
