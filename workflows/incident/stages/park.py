"""Park: the job waits for an operator, for silent machines, or for an urgent update; nothing is lost meanwhile."""

from __future__ import annotations

from datetime import timedelta

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from everstep.base.text import listed
    from everstep.decisions.act.recover.incident_state import Continued
    from everstep.decisions.act.recover.plan import RestartPlan
    from everstep.model.eviction import named
    from everstep.model.stage import Stage
    from workflows.incident.incident import Abandoned, Incident
    from workflows.incident.stages.awaited import THERE_ARE_OTHERS, Awaited


async def park(incident: Incident, plan: RestartPlan) -> None:
    """Wait until an operator resumes the job, silent machines answer, or an urgent update arrives.

    Raises:
        Abandoned: an operator ended the incident, or there was no answer in time.
    """
    timeline, state, silent = incident.timeline, incident.state, plan.verdict.awaited
    incident.answer, incident.accepting, incident.parked_by = None, False, plan.verdict.rule
    timeline.to_accept = plan.restore.origin if plan.doubt else ""
    timeline.to_approve = named(state.evictions.waiting)
    incident.asked_rung = plan.rung.rung if plan.verdict.rule == "ladder-asks" and plan.rung else None
    before = [(version.number, version.asked_ns) for version in incident.state.book.urgent()]
    began = timeline.enter(Stage.PARKED, plan.verdict.text)

    def updates() -> list[str]:
        """Return the urgent updates that arrived meanwhile."""
        urgent = incident.state.book.urgent()
        return [version.name for version in urgent if (version.number, version.asked_ns) not in before]

    await incident.notify_job()
    patience = timedelta(hours=state.spec.policy.park.timeout_h)
    machines = [machine for machine in state.machines if machine.name in silent]
    awaited = Awaited(machines, incident.state.evictions.missing, patience)
    try:
        await incident.wait(
            patience, "PARKED", until=lambda: incident.answer is not None or awaited.either or bool(updates())
        )
    finally:
        timeline.page.parked.append((int(began * 1e9), workflow.time_ns()))
        awaited.cancel()
    if incident.answer is not None:
        await _resumed(incident, plan, began)
    elif awaited.either:
        await _continue(incident, began, f"{listed(silent)} answers again" if awaited.came_back else THERE_ARE_OTHERS)
    elif new := updates():
        incident.begin_again()
        await _continue(incident, began, f"the update to {listed(new)} is urgent")
    else:
        incident.abandoned_by = "a time-out, because no operator answered"
        raise Abandoned
    await incident.renew(Continued.PARKED)


async def _continue(incident: Incident, began: float, why: str) -> None:
    """Continue without an operator: the machines are asked again."""
    timeline = incident.timeline
    timeline.leave(began, Stage.PARKED, why)
    timeline.note(Stage.PARKED, why)
    timeline.enter(Stage.STOP)
    await incident.notify_job()


async def _resumed(incident: Incident, plan: RestartPlan, began: float) -> None:
    timeline, state, who = incident.timeline, incident.state, incident.answered_by
    if incident.answer == "approve" and not incident.state.evictions.waiting and incident.asked_rung is not None:
        state.ladder.approved.add(incident.asked_rung)
        await _continue(incident, began, f"{incident.asked_rung}, approved by {who}")
        return
    if incident.answer == "approve":
        incident.state.evictions.approve(who)
        approved = f"{named(incident.state.evictions.waiting)}, approved by {who}"
        await _continue(incident, began, approved)
        return
    incident.state.operator.resumed_by = who
    if state.waits:
        incident.state.evictions.decline()
    timeline.leave(began, Stage.PARKED, f"resumed by {who}")
    timeline.note(Stage.PARKED, f"resumed by {who}")
    if incident.accepting and plan.doubt is not None:
        accepted = state.accept(plan.restore, plan.doubt, who)
        timeline.leave(workflow.time(), Stage.ACCEPTED, accepted)
        timeline.note(Stage.ACCEPTED, accepted)
    incident.begin_again()
    incident.state.operator.resumed = True
    timeline.enter(Stage.REATTEMPT)
    await incident.notify_job()
