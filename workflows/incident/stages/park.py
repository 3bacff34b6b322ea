"""Park: the job waits for an operator, or for machines that are silent; nothing is lost meanwhile."""

from __future__ import annotations

from datetime import timedelta

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from everstep.decisions.recover.plan import RestartPlan
    from everstep.model.incident import Stage
    from everstep.text import listed
    from workflows import activity_calls, pool_calls
    from workflows.incident.incident import Abandoned, Incident


async def park(incident: Incident, plan: RestartPlan) -> None:
    """Wait until somebody resumes the job, or those machines answer again.

    Raises:
        Abandoned: an operator ended the incident, or nobody answered in time.
    """
    timeline, input, silent = incident.timeline, incident.input, plan.verdict.silent
    incident.answer, incident.accepting = None, False
    timeline.to_accept = plan.restore.origin if plan.doubt else ""
    began = timeline.enter(Stage.PARKED, plan.verdict.reason)
    await incident.tell_job()
    patience = timedelta(hours=input.spec.policy.parked_timeout_h)
    machines = [machine for machine in input.machines if machine.name in silent]
    back: workflow.ActivityHandle[list[str]] | None = None
    if machines and workflow.patched("machines that come back"):
        back = activity_calls.await_machines(machines, patience)
    others = pool_calls.await_standbys(incident.missing, patience) if incident.missing else None

    def came_back() -> bool:
        return back is not None and back.done() and back.exception() is None and not back.result()

    def there_are_others() -> bool:
        return others is not None and others.done() and others.exception() is None

    try:
        await incident.wait(
            patience, "PARKED", until=lambda: incident.answer is not None or came_back() or there_are_others()
        )
    finally:
        timeline.parked.append((int(began * 1e9), workflow.time_ns()))
        for waiting in (back, others):
            if waiting is not None:
                waiting.cancel()
    if incident.answer is not None:
        await _resumed(incident, plan, began)
    elif came_back() or there_are_others():
        text = f"{listed(silent)} answers again" if came_back() else "there are machines for all that leave the job"
        timeline.leave(began, Stage.PARKED, text)
        timeline.note(Stage.PARKED, text)
        timeline.enter(Stage.STOP)
        await incident.tell_job()
    else:
        incident.abandoned_by = "nobody answered in time"
        raise Abandoned
    await incident.renew(resumed=incident.resumed, came_back=not incident.resumed)


async def _resumed(incident: Incident, plan: RestartPlan, began: float) -> None:
    timeline, state, who = incident.timeline, incident.state, incident.resumed_by
    if incident.answer == "approve":
        incident.evictions.approved_by = who
        timeline.leave(began, Stage.PARKED, f"approved by {who}")
        timeline.note(Stage.PARKED, f"approved by {who}")
        timeline.enter(Stage.STOP)
        await incident.tell_job()
        return
    if state.waits:
        incident.evictions.decline()
    timeline.leave(began, Stage.PARKED, f"resumed by {who}")
    timeline.note(Stage.PARKED, f"resumed by {who}")
    if incident.accepting and plan.doubt is not None:
        accepted = state.accept(plan.restore, plan.doubt, who)
        timeline.leave(workflow.time(), Stage.ACCEPTED, accepted)
        timeline.note(Stage.ACCEPTED, accepted)
    state.begin_again()
    incident.resumed = True
    timeline.enter(Stage.REATTEMPT)
    await incident.tell_job()
