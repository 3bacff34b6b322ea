"""Confirm: watch the ranks of the new generation until they step."""

from __future__ import annotations

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from activities.agents.confirm_steps import ConfirmSteps
    from everstep.model.launch import Confirmation, Launched
    from workflows.first_step import confirm_restart
    from workflows.incident.incident import Incident
    from workflows.incident.stages.stop import impatient
    from workflows.start_activity import start_activity


async def confirm(incident: Incident, launched: Launched, state_bytes: int) -> Confirmation:
    """Return whether the new generation steps.

    Args:
        incident: The incident.
        launched: The launched generation.
        state_bytes: The size of the largest state that a rank restores, bytes.
    """
    state = incident.state

    async def ask(bound_s: float) -> Confirmation:
        return await incident.unless_abandoned(
            start_activity(
                ConfirmSteps(
                    job=state.placed,
                    launched=launched,
                    timeout_s=bound_s,
                    showing=incident.state.showing,
                    state_bytes=state_bytes,
                    silent_s=state.spec.policy.silence.detect_s if impatient(incident) else 0.0,
                )
            )
        )

    return await confirm_restart(ask, lambda wait: incident.wait(wait, "ASK AGAIN"), state)
