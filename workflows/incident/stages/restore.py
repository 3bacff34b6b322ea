"""Restore: bring copies of state to the machines whose ranks need them."""

from __future__ import annotations

from datetime import timedelta

from temporalio import workflow
from temporalio.exceptions import ActivityError

with workflow.unsafe.imports_passed_through():
    from activities.agents.restore_checkpoints import RestoreCheckpoints
    from everstep.decisions.act.recover.plan import RestartPlan
    from everstep.decisions.act.recover.rules import backoff_s
    from everstep.model.evidence import Evidence
    from everstep.model.stage import Stage
    from workflows import web_ui
    from workflows.incident.incident import Incident
    from workflows.incident.stages.stop import refresh_evidence
    from workflows.start_activity import start_activity


async def restore(incident: Incident, plan: RestartPlan) -> Evidence | None:
    """Move copies to the slots that lack them; returns None if all succeed, and otherwise the evidence for a new
    decision."""
    wanted = plan.restore
    if not wanted.copies and not wanted.unverified:
        return None
    state, timeline = incident.state, incident.timeline
    if state.failed_restores:
        timeline.enter(Stage.BACKOFF)
        wait_s = backoff_s(state.failed_restores, state.spec.policy)
        await incident.wait(timedelta(seconds=wait_s), "BACKOFF")
    began = timeline.enter(Stage.RESTORE)
    try:
        restored = await incident.unless_abandoned(
            start_activity(RestoreCheckpoints.of(state.placed, wanted, plan.evidence))
        )
    except ActivityError as error:
        timeline.leave(began, Stage.RESTORE, f"failed: {error.cause or error}")
        return await _failed(incident)
    text = web_ui.restored_text(restored)
    timeline.leave(began, Stage.RESTORE, text)
    timeline.note(Stage.RESTORE, text)
    choose_again = state.record_restored(restored)
    if restored.unreachable:
        # Such a machine may answer again without its memory; then the backups in it are lost.
        return await _failed(incident)
    return plan.evidence if choose_again else None


async def _failed(incident: Incident) -> Evidence:
    incident.state.attempts += 1
    incident.state.failed_restores += 1
    return await refresh_evidence(incident)
