"""Trace: sample the ranks of a hung job before they are stopped, to see on which machine it hangs.

The time is limited. A trace that fails, or has no result, delays nothing.
"""

from __future__ import annotations

from temporalio import workflow
from temporalio.exceptions import ActivityError

with workflow.unsafe.imports_passed_through():
    from activities.agents.trace_ranks import TraceRanks
    from everstep.model.hang import HangConclusion
    from everstep.model.incident import Symptom
    from everstep.model.stage import Stage
    from workflows.incident.incident import Incident
    from workflows.start_activity import start_activity

EXPLAINS = frozenset({HangConclusion.NAMES, HangConclusion.OVER_EVICTS, HangConclusion.NOT_A_MACHINE})
"""The results that explain why the job hung: the incident's headline shows them."""
SYMPTOMS = frozenset({Symptom.HANG})
"""The symptoms for which the living ranks are sampled."""


async def trace(incident: Incident) -> None:
    """Sample the ranks of a hung job; the result is kept in ``incident.state.hang``."""
    state, timeline = incident.state, incident.timeline
    if state.anomaly.symptom not in SYMPTOMS or incident.looks_again or not state.spec.policy.hang.trace_s:
        return
    began = timeline.enter(Stage.TRACE)
    asked = start_activity(TraceRanks(job=state.placed, generation=incident.state.generation, incident=incident.id))
    try:
        found = await incident.unless_abandoned(asked)
    except ActivityError as error:
        timeline.leave(began, Stage.TRACE, f"failed: {error.cause or error}")
        return
    incident.state.hang, timeline.page.picture = found, found.picture
    text = f"{found.conclusion}: {found.reason}"
    timeline.leave(began, Stage.TRACE, text)
    if found.conclusion in EXPLAINS:
        timeline.page.headline = f"{timeline.page.headline.partition(': ')[0]}: {found.reason}"
    timeline.note(Stage.TRACE, text)
