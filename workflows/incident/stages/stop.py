"""Stop: end every rank of the failed generation, and ask the machines for their evidence."""

from __future__ import annotations

from typing import Any

from temporalio import workflow
from temporalio.exceptions import ActivityError

with workflow.unsafe.imports_passed_through():
    from activities.agents.stop_ranks import StopRanks
    from everstep.decisions.act.evict.rules import BY_NAME, GONE, mode_of
    from everstep.model.eviction import EvictMode
    from everstep.model.evidence import Evidence
    from everstep.model.incident import Failure
    from everstep.model.stage import Stage
    from workflows import web_ui
    from workflows.incident.incident import Incident
    from workflows.incident.stages.judge import judge
    from workflows.start_activity import start_activity


DYING_S = 15.0
"""The machines are asked again after this time while killed ranks are not gone, seconds."""
LEAST_S = 1.0
"""The shortest time after which the machines are asked again, seconds."""


async def stop(incident: Incident) -> Evidence:
    """Stop the generation and count its failure; returns the machines' evidence."""
    evidence = await _stop(incident)
    incident.state.record_failure(_failure(incident, evidence, first=not incident.state.failures))
    return evidence


async def refresh_evidence(incident: Incident, *, patient: bool = False) -> Evidence:
    """Ask the machines again, because their knowledge of the failure may have changed.

    Args:
        incident: The incident.
        patient: Wait for silent machines as long as in a job without standbys.
    """
    evidence = await _stop(incident, patient=patient)
    failures = incident.state.failures
    failures[-1] = _failure(incident, evidence, first=len(failures) == 1)
    return evidence


async def _stop(incident: Incident, *, patient: bool = False) -> Evidence:
    state, timeline = incident.state, incident.timeline
    began = timeline.enter(Stage.STOP)
    try:
        evidence = await _until_gone(incident, {} if patient else impatient(incident), began)
    except ActivityError as error:
        # Without evidence the job cannot continue: it is parked, and the machines are asked again when an operator
        # resumes.
        evidence = Evidence(generation=state.generation, problem=str(error.cause or error)[:300])
    evidence = state.merge_evidence(evidence)
    timeline.leave(began, Stage.STOP, web_ui.stopped_text(evidence, state.explain(evidence)))
    return evidence


def impatient(incident: Incident) -> dict[str, Any]:
    """Return how long a silent machine is asked if another may replace it: a rule decides when it is lost.

    An empty result means that no machine leaves the job for its silence.
    """
    policy = incident.state.spec.policy
    if mode_of(BY_NAME[GONE], policy) not in {EvictMode.ACT, EvictMode.APPROVE}:
        return {}
    return {"patience_s": policy.silence.evict_s, "probed": True}


async def _until_gone(incident: Incident, bounds: dict[str, Any], began: float) -> Evidence:
    """Ask the machines to stop, and repeat while killed ranks still exist; the page shows this, since it can take
    minutes.

    Without bounds, the request is repeated until the ranks are gone, or the policy's time for them is over. With
    bounds, it ends earlier if each machine with such ranks is to leave the job.

    Args:
        incident: The incident.
        bounds: How long a silent machine is asked; empty: as long as in a job without standbys.
        began: When the stop began, seconds of the workflow's clock.
    """
    state, policy = incident.state, incident.state.spec.policy
    deadline, notified = began + policy.stop.kill_patience_s, False
    dying_s = policy.silence.evict_s if bounds else DYING_S
    while True:
        stop_ranks = StopRanks(job=state.placed, generation=incident.state.generation, dying_s=dying_s, **bounds)
        evidence = await incident.unless_abandoned(start_activity(stop_ranks))
        incident.heard(evidence.unreachable, evidence.dying, began)
        if not evidence.dying:
            break
        if bounds and evidence.dying.keys() <= {one.machine for one in judge(incident, evidence).evict}:
            break
        text = web_ui.dying_text(evidence)
        if workflow.time() >= deadline:
            return evidence.model_copy(update={"problem": f"{text}; they have {policy.stop.kill_patience_s:g} s"})
        dying_s = min(max(began + policy.stop.evict_s - workflow.time(), LEAST_S), DYING_S) if bounds else DYING_S
        incident.timeline.show_reason(text)
        await incident.notify_job(f"stop: {text}")
        notified = True
    if notified:
        incident.timeline.show_reason("")
        await incident.notify_job()
    return evidence


def _failure(incident: Incident, evidence: Evidence, *, first: bool) -> Failure:
    incident.timeline.page.headline = incident.state.explain(evidence) or incident.timeline.page.headline
    return incident.state.read_failure(evidence, now_ns=workflow.time_ns(), first=first)
