"""Decide: plan the restart. Before that, search for a newer step that may exist on a disk or remote storage."""

from __future__ import annotations

from datetime import timedelta

from temporalio import workflow
from temporalio.exceptions import ActivityError

with workflow.unsafe.imports_passed_through():
    from activities.agents.find_checkpoints import FindCheckpoints
    from everstep.decisions.act.recover.plan import RestartPlan, plan_restart
    from everstep.decisions.act.recover.rules import Action
    from everstep.decisions.keep.search import merged, unanswered
    from everstep.model.evidence import Evidence
    from everstep.model.hang import HangConclusion
    from everstep.model.stage import Stage
    from workflows import web_ui
    from workflows.incident.incident import Incident
    from workflows.start_activity import start_activity


async def decide(incident: Incident, evidence: Evidence) -> RestartPlan:
    """Return the plan; ask disks and remote storage as long as the plan demands it."""
    by_operator, incident.state.operator.resumed = incident.state.operator.resumed, False
    plan = await _plan(incident, evidence, by_operator=by_operator)
    if plan.by_operator:
        return plan
    timeline = incident.timeline
    began = timeline.enter(Stage.DECIDE)
    timeline.leave(began, Stage.DECIDE, plan.text)
    timeline.note(Stage.DECIDE, plan.text, None if plan.evidence is incident.noted else plan.evidence)
    incident.noted = plan.evidence
    return plan


async def _plan(incident: Incident, evidence: Evidence, *, by_operator: bool) -> RestartPlan:
    state = incident.state
    hang = incident.state.hang
    not_a_machine = hang is not None and hang.conclusion == HangConclusion.NOT_A_MACHINE
    state.ladder.of_script = not_a_machine and hang is not None and hang.generation == state.failures[-1].generation
    while True:
        plan = plan_restart(evidence, state, by_operator=by_operator)
        if plan.action is not Action.SEARCH:
            return plan
        verdict = plan.verdict
        if verdict.delay_s:
            incident.timeline.note(Stage.FIND, verdict.text)
            incident.timeline.enter(Stage.FIND, verdict.text)
            await incident.wait(timedelta(seconds=verdict.delay_s), "ASK AGAIN")
        state.asked += 1
        state.try_unreached_again()
        if plan.doubt is not None and plan.doubt.unlisted:
            evidence = await _find(incident, evidence)


async def _find(incident: Incident, evidence: Evidence) -> Evidence:
    """Ask for copies that the answers to a stop do not list."""
    state, timeline = incident.state, incident.timeline
    began = timeline.enter(Stage.FIND)
    try:
        found = await incident.unless_abandoned(start_activity(FindCheckpoints(job=state.placed)))
    except ActivityError as error:
        # An unknown result is not an empty result.
        reason = f"could not be asked: {error.cause or error}"[:300]
        evidence = unanswered(evidence, [machine.name for machine in state.machines], reason)
    else:
        evidence = merged(evidence, found)
    timeline.leave(began, Stage.FIND, web_ui.searched_text(evidence))
    return evidence
