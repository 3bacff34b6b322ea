"""Judge: decide which machines leave the job, from everything that is known about them now."""

from __future__ import annotations

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from everstep.decisions.act.evict.plan_evictions import EvictFacts, EvictPlan, plan_evictions
    from everstep.decisions.blame.alerts import alerts_kept
    from everstep.decisions.blame.first_failure import first_failure
    from everstep.decisions.blame.hang.analysis import findings_of_hang
    from everstep.decisions.blame.repeated_errors import findings_of_errors
    from everstep.decisions.blame.silence import findings_of_dying, findings_of_silence
    from everstep.decisions.blame.slow.by_samples import findings_of_vote
    from everstep.model.evidence import Evidence
    from everstep.model.finding import MachineFinding
    from workflows.incident.incident import Incident


def judge(incident: Incident, evidence: Evidence | None) -> EvictPlan:
    """Return what the rules decide from the evidence; without evidence, from the anomaly alone."""
    state, evictions = incident.state, incident.state.evictions
    state.alerts = alerts_kept(state.alerts, evidence.findings if evidence else [], workflow.time_ns())
    facts = EvictFacts(
        now_ns=workflow.time_ns(),
        machines=[machine.name for machine in state.machines],
        findings=_findings(incident, evidence),
        alike=evidence.alike if evidence else state.anomaly.alike,
        earlier=state.alerts,
        evicted_ns=[*state.evicted_ns, *evictions.done_ns],
        stopped=evidence is not None,
    )
    plan = plan_evictions(facts, state.spec.policy)
    evictions.record(plan.asked)
    return plan.without(evictions.declined)


def _findings(incident: Incident, evidence: Evidence | None) -> list[MachineFinding]:
    """Return all findings about machines of the job; without evidence, those of the anomaly, the hang and the vote."""
    state, generation, policy = incident.state, incident.state.generation, incident.state.spec.policy
    found = list(state.anomaly.findings)
    if evidence:
        silent = findings_of_silence(
            incident.silent_for(evidence.unreachable), policy, refusing=evidence.refusing, cut_off=evidence.cut_off
        )
        dying = findings_of_dying(evidence.dying, incident.dying_for(evidence.dying), policy)
        errors = findings_of_errors(
            first_failure(evidence.exits),
            [one for one in (*state.history, *state.failures) if one.generation < evidence.generation],
            {tried.rung for tried in (*state.ladder.tried, *state.ladder.remembered)},
        )
        found = [*evidence.findings, *state.ladder.tested, *silent, *dying, *errors]
    if state.hang and state.hang.generation == generation and not state.evictions.hang_stays:
        found += findings_of_hang(state.hang)
    if state.slow and state.slow.generation == generation:
        found += findings_of_vote(state.slow)
    return found
