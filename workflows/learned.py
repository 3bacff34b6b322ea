"""What a job learns from the report of an incident that was to bring it back."""

from __future__ import annotations

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from everstep.decisions.checkpoints.lineage import extended
    from everstep.decisions.recover.rules import still_counting
    from everstep.model.incident import IncidentReport
    from everstep.model.job_state import JobState

FAILURES_KEPT = 50


def learn(state: JobState, report: IncidentReport) -> bool:
    """Bring a job's state up to date; returns whether its first step has still to be waited for."""
    state.generation = report.generation
    state.status = "running" if report.recovered else "failed"
    state.unproductive_s += report.seconds or 0.0
    if report.failures:
        still = still_counting(state.failures, report.failures[0], state.spec.policy)
        state.failures = [*still, *report.failures][-FAILURES_KEPT:]
    state.resume_step = report.resume_step
    if report.showing.kind:
        state.showing = report.showing
    state.first_step_s = max(state.first_step_s, report.first_step_s)
    state.lineage = extended(state.lineage, report.lineage)
    if report.recovered and report.confirmation and not report.confirmed:
        state.unconfirmed = report.confirmation.reason
        return True
    return False
