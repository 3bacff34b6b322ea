"""The report of an incident that ended: the job recovered, continued unchanged, or was abandoned."""

from __future__ import annotations

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from everstep.base.text import listed
    from everstep.model.eviction import Eviction
    from everstep.model.incident import IncidentReport, Symptom
    from everstep.model.launch import Confirmation
    from everstep.model.stage import NOT_CONFIRMED
    from workflows import web_ui
    from workflows.incident.incident import Incident


def recovered_report(incident: Incident, confirmation: Confirmation) -> IncidentReport:
    """Return the report of an incident that recovered its job."""
    parked_ns = sum(end - begin for begin, end in incident.timeline.page.parked)
    seconds = max(confirmation.stepped_ns - incident.state.anomaly.seen_ns - parked_ns, 0) / 1e9
    lost_steps = incident.state.lost_steps
    lost = "" if lost_steps is None else f", lost {web_ui.count(lost_steps, 'step')}"
    resolution = "resumed by operator" if incident.state.operator.resumed_by else "reattempt"
    how = "after an operator's resume" if incident.state.operator.resumed_by else "by reattempt"
    if out := incident.state.evictions.done:
        resolution, how = (
            (resolution if incident.state.operator.resumed_by else "eviction"),
            f"by eviction of {_who_left(out)}",
        )
    if changes := incident.state.version_changes:
        versions = " and ".join(
            f"back to v{one.number}" if one.suspect else f"update to v{one.number}" for one in changes
        )
        rolled_back = changes[-1].suspect or len(changes) > 1
        if not (out or incident.state.operator.resumed_by) or rolled_back:
            resolution = "rollback" if rolled_back else "update"
        how = f"by {versions}" if not out else f"{how} and {versions}"
    if incident.state.accepted:
        how = "after an operator accepted a loss"
    headline = f"Recovered in {seconds:.2f} s {how}{lost}: {incident.timeline.page.headline}"
    if resolution == "update" and incident.state.anomaly.symptom is Symptom.UPDATE:  # there was no failure
        headline = f"Done in {seconds:.2f} s{lost}: {incident.timeline.page.headline}"
    if not confirmation.confirmed:
        resolution = NOT_CONFIRMED
        headline = (
            f"{NOT_CONFIRMED.capitalize()}, {how}{lost}: {incident.timeline.page.headline} ({confirmation.reason})"
        )
    return _report(
        incident,
        headline=headline,
        resolution=resolution,
        seconds=round(seconds, 4) if confirmation.confirmed else None,
        confirmation=confirmation,
    )


def _who_left(evictions: list[Eviction]) -> str:
    """Return e.g. ``m1, m2``, and the operator who approved it."""
    text = listed([one.machine for one in evictions], 4)
    by: dict[str, list[str]] = {}
    for one in evictions:
        by.setdefault(one.approved_by, []).append(one.machine)
    if len(by) == 1:
        [who] = by
        return f"{text}, approved by {who}" if who else text
    return f"{text}, of which {'; '.join(f'{who} approved {listed(names, 4)}' for who, names in by.items() if who)}"


def observed_report(incident: Incident) -> IncidentReport:
    """Return the report of an incident that only records a fault while the job continues."""
    state = incident.state
    reasons = dict.fromkeys(found.finding.reason for found in state.anomaly.findings)
    sampled = incident.timeline.page.stages if state.anomaly.symptom is Symptom.SLOW else []
    return IncidentReport(
        headline=f"Observed, the job continues: {_observed(incident)}",
        resolution="observed",
        cause=", ".join(reasons) or str(state.anomaly.symptom),
        step=-1,
        lost_steps=0,
        evicted=[],
        stages=[f"{stage.name}, {stage.seconds:.2f} s: {stage.found}" for stage in sampled],
        timings=sampled,
        asked=incident.state.evictions.asked,
        generation=state.generation,
        resume_step=state.resume_step,
        recovered=True,
        seconds=None,
        failures=[],
        findings=state.anomaly.findings,
        slow=incident.state.slow,
    )


def _observed(incident: Incident) -> str:
    """Return the observation, and for a slow job the result of the vote."""
    headline, slow = incident.state.anomaly.headline, incident.state.slow
    return f"{headline}; {slow.conclusion}: {slow.reason}" if slow else headline


def abandoned_report(incident: Incident) -> IncidentReport:
    """Return the report of an incident that was abandoned."""
    return _report(
        incident,
        headline=f"Abandoned by {incident.abandoned_by}: {incident.timeline.page.headline}",
        resolution="abandoned",
        seconds=None,
    )


def _report(
    incident: Incident,
    *,
    headline: str,
    resolution: str,
    seconds: float | None,
    confirmation: Confirmation | None = None,
) -> IncidentReport:
    first = incident.state.failures[0] if incident.state.failures else None
    stages = incident.timeline.page.stages
    return IncidentReport(
        headline=headline,
        resolution=resolution,
        cause=first.cause if first else str(incident.state.anomaly.symptom),
        step=first.step if first else -1,
        lost_steps=incident.state.lost_steps,
        evicted=[one.machine for one in incident.state.evictions.done],
        stages=[f"{stage.name}, {stage.seconds:.2f} s: {stage.found}" for stage in stages],
        generation=incident.state.generation,
        resume_step=incident.state.resume_step,
        save_every=incident.state.save_every,
        recovered=confirmation is not None,
        seconds=seconds,
        failures=incident.state.failures,
        confirmation=confirmation,
        timings=stages,
        lineage=incident.state.launches,
        accepted_loss=incident.state.accepted,
        confirmed=confirmation is None or confirmation.confirmed,
        showing=confirmation.showing if confirmation and confirmation.showing.kind else incident.state.showing,
        first_step_s=round(incident.first_step_s, 3),
        findings=incident.state.findings,
        classification=first.classification if first else incident.state.anomaly.classification,
        asked=incident.state.evictions.asked,
        machines=incident.state.machines if incident.state.evictions.done else [],
        evicted_ns=incident.state.evictions.done_ns,
        version=incident.state.book.running,
        versions=incident.state.book.changed(),
        tried=incident.state.ladder.all_tried,
        begun_again_ns=incident.state.operator.begun_again_ns,
        hang=incident.state.hang,
        slow=incident.state.slow,
        approved={one.machine: one.approved_by for one in incident.state.evictions.done if one.approved_by},
    )
