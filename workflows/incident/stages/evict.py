"""Evict: machines that are at fault or lost leave the job, and standbys replace them.

A job whose ranks continue is stopped only once a replacement is ready for each machine that leaves. If there are too
few replacements, or an operator must approve, no machine leaves, and the job waits (``park``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from datetime import timedelta
from types import MappingProxyType

from temporalio import workflow
from temporalio.exceptions import ActivityError

with workflow.unsafe.imports_passed_through():
    from activities.agents.prepare_machines import PrepareMachines
    from activities.pool.requests import ReplaceMachines
    from everstep.decisions.act.evict.rules import waits_for_another
    from everstep.model.eviction import STANDBY_UNFIT, EvictAnswer, Eviction, named
    from everstep.model.evidence import Evidence
    from everstep.model.machine import Machine
    from everstep.model.pool import Replaced, ReplaceRequest
    from everstep.model.stage import Stage
    from workflows.incident.incident import Incident, Secured
    from workflows.incident.stages.awaited import THERE_ARE_OTHERS, Awaited
    from workflows.incident.stages.judge import judge
    from workflows.incident.stages.stop import refresh_evidence
    from workflows.start_activity import start_activity

PATIENCE = timedelta(seconds=30)
"""The job is parked if silent machines without a replacement do not answer within this time."""
NONE_STAYS: Mapping[str, str] = MappingProxyType({})
LIKE = 3
"""The number of machines that are asked which libraries a new machine needs; one answer is enough."""


async def secure(incident: Incident) -> bool:
    """Make replacements for faulty machines ready while the ranks continue; returns whether there are any.

    The ranks are not stopped earlier, and without a replacement they are not stopped at all.
    """
    plan = judge(incident, None)
    if plan.ask:
        incident.timeline.note(Stage.EVICT, f"{named(plan.ask)}: an operator has to approve. {plan.tripped}".strip())
    if not plan.evict:
        return False
    began, replaced = await _replacements(incident, plan.evict)
    if not replaced.machines:
        incident.timeline.leave(began, Stage.EVICT, replaced.why)
        incident.timeline.note(Stage.EVICT, f"{named(plan.evict)}: {replaced.why}; the job continues with it")
        return False
    secured = Secured(plan.evict, replaced, await _make_ready(incident, replaced))
    incident.timeline.leave(began, Stage.EVICT, _exchanged(secured.leaving, replaced))
    secured = await _with_others(incident, secured)
    incident.secured = secured if secured.leaving else None
    return bool(secured.leaving)


async def _with_others(incident: Incident, secured: Secured) -> Secured:
    """Replace unfit replacements by others; if there is no other, the machine that should leave stays in the job."""
    places, leaving, unfit = dict(secured.replaced.machines), secured.leaving, secured.unfit
    while unfit:
        names = _names(unfit)
        back = {new.name: old for old, new in places.items() if new.name in names}
        fit = [new for new in places.values() if new.name not in names]
        began, again = await _replacements(incident, unfit, fit=fit, back=back)
        incident.timeline.leave(began, Stage.EVICT, _exchanged(unfit, again) if again.machines else again.why)
        if not again.machines:  # no answer, or the replaced machines have no lease any more: evict() asks again
            break
        new = {back[name]: machine for name, machine in again.machines.items()}
        stay = {old for old, machine in new.items() if machine.name == old}
        if stay:
            kept = [one for one in leaving if one.machine in stay]
            why = f"{named(unfit)} cannot join: {again.why}; the job continues with it"
            incident.timeline.note(Stage.EVICT, f"{named(kept)}: {why}")
        leaving = [one for one in leaving if one.machine not in stay]
        places = {old: machine for old, machine in (places | new).items() if old not in stay}
        unfit = await _make_ready(incident, Replaced(machines={old: places[old] for old in new if old not in stay}))
    return Secured(leaving, Replaced(machines=places), unfit)


def note_answers(incident: Incident) -> None:
    """Note the rules' answers, so that the report shows them; no machine leaves."""
    judge(incident, None)


async def evict(incident: Incident, evidence: Evidence) -> Evidence:
    """Evict machines from a stopped job; returns the evidence of its machines after that."""
    evictions, patient = incident.state.evictions, False
    if (secured := incident.secured) is not None:
        incident.secured, evictions.unfit = None, secured.unfit
        await _exchange(incident, secured.leaving, secured.replaced)
        evidence = await refresh_evidence(incident)
    while True:
        incident.state.waits, incident.state.evictions.missing, incident.state.evictions.waiting = "", 0, []
        plan = judge(incident, evidence)
        leaving = _with_approval(incident, [*plan.evict, *_unfit(incident, _names(plan.evict))])
        leaving += _approved(incident, [one for one in plan.ask if one.machine not in _names(leaving)])
        if not leaving and not plan.ask and (patient or not (evidence.cut_off or evidence.refusing)):
            return evidence
        if plan.tripped and _only_software(plan.ask) and not evictions.hang_stays:
            evictions.hang_stays = True
            incident.timeline.note(Stage.EVICT, f"{named(plan.ask)}: {plan.tripped}; the job is tried again with them")
            continue
        waits = []
        if leaving:
            began, replaced = await _replacements(incident, leaving)
            if replaced.machines:
                await _exchange(incident, leaving, replaced)
                evictions.unfit = await _make_ready(incident, replaced)
                incident.timeline.leave(began, Stage.EVICT, _exchanged(leaving, replaced))
                evidence, patient = await refresh_evidence(incident), False
                continue
            if not evictions.hang_stays and not all(waits_for_another(one.rule) for one in leaving):
                # The fault may be in the software, and a restart may be enough, so the job does not wait for a machine.
                evictions.hang_stays = True
                incident.timeline.leave(began, Stage.EVICT, f"{replaced.why}; the job is tried again with them")
                continue
            incident.timeline.leave(began, Stage.EVICT, replaced.why)
            if replaced.held:
                evictions.waiting = leaving
                waits.append(_question(incident.state.job, leaving, replaced.held))
            else:
                evictions.missing = len(leaving)
                verb, its = ("leaves", "its") if len(leaving) == 1 else ("leave", "their")
                waits.append(f"{named(leaving)} {verb} the job once there is a machine in {its} place: {replaced.why}")
        if asking := [one for one in plan.ask if one.machine not in _names(leaving)]:
            evictions.waiting = [*evictions.waiting, *asking]
            waits.append(_question(incident.state.job, asking, plan.tripped))
        if evidence.cut_off:
            waits.append("no machine of the cluster answers: the workers may be cut off")
        waits += dict.fromkeys(evidence.refusing.values())
        incident.state.waits = "; ".join(waits)
        if not (evidence.unreachable or evidence.dying) or patient:
            return evidence
        # There is no replacement now, so the machines are awaited as long as in a job without standbys.
        evidence, patient = await _patiently(incident, evidence), True


def _only_software(asking: Sequence[Eviction]) -> bool:
    """Return whether a restart with the same machines may be enough, so that the job does not wait for an operator."""
    return bool(asking) and not any(waits_for_another(one.rule) for one in asking)


def _unfit(incident: Incident, others: set[str]) -> list[Eviction]:
    """Return the job's machines that could not be made ready, without ``others`` and those that an operator keeps."""
    kept = {*incident.state.evictions.declined, *others}
    here = {machine.name for machine in incident.state.machines} - kept
    return [one for one in incident.state.evictions.unfit if one.machine in here]


async def _patiently(incident: Incident, evidence: Evidence) -> Evidence:
    """Wait for silent machines, or for replacements; returns the evidence after that."""
    timeline = incident.timeline
    began = timeline.enter(Stage.EVICT, incident.state.waits)
    silent = [machine for machine in incident.state.machines if machine.name in evidence.unreachable]
    awaited = Awaited(silent, incident.state.evictions.missing, PATIENCE)
    try:
        await incident.wait(
            PATIENCE, "silent machines, or replacements", until=lambda: awaited.either or awaited.stay_silent
        )
    finally:
        awaited.cancel()
    text = "the silent machines answer again" if awaited.came_back else "the silent machines stay silent"
    timeline.leave(began, Stage.EVICT, THERE_ARE_OTHERS if awaited.there_are_others else text)
    return await refresh_evidence(incident, patient=bool(evidence.dying))


def _question(job: str, asking: list[Eviction], tripped: str) -> str:
    """Return the question for an operator, and how to answer it."""
    subject, leaves, them = ("it", "leaves", "it") if len(asking) == 1 else ("they", "leave", "them")
    return (
        f"{named(asking)}: an operator has to approve that {subject} {leaves} the job ('everstep approve {job}'); "
        f"'everstep resume {job}' continues with {them}. {tripped}"
    ).strip()


def _approved(incident: Incident, asked: list[Eviction]) -> list[Eviction]:
    """Return the machines whose eviction is approved; an approval is valid until there is a replacement for each."""
    return [one for one in _with_approval(incident, asked) if one.approved_by]


def _with_approval(incident: Incident, evictions: list[Eviction]) -> list[Eviction]:
    """Return evictions with the operators who approved them."""
    who = incident.state.evictions.approved
    return [one.model_copy(update={"approved_by": who.get(one.machine, "")}) for one in evictions]


async def _replacements(
    incident: Incident, leaving: list[Eviction], *, fit: Sequence[Machine] = (), back: Mapping[str, str] = NONE_STAYS
) -> tuple[float, Replaced]:
    """Ask the pool for replacements; returns the start of the request, and the answer.

    Args:
        incident: The incident.
        leaving: The machines that leave.
        fit: Replacements that are ready, besides the job's own machines.
        back: Machine that leaves → machine that it replaced, which stays in the job if the pool has too few machines.
    """
    state, evictions = incident.state, incident.state.evictions
    began = incident.timeline.enter(Stage.EVICT, named(leaving))
    evictions.requests += 1
    names = _names(leaving)
    request = ReplaceRequest(
        id=f"{incident.id}/{state.run}/{evictions.requests}",
        job=state.job,
        run=state.run,
        evict=leaving,
        keep=[*(machine for machine in state.machines if machine.name not in names), *fit],
        back=dict(back),
    )
    try:
        return began, await incident.unless_abandoned(start_activity(ReplaceMachines(request=request)))
    except ActivityError as error:
        return began, Replaced(why=f"the pool of machines does not answer: {error.cause or error}"[:300])


async def _exchange(incident: Incident, leaving: list[Eviction], replaced: Replaced) -> None:
    """Put the replacements into the job."""
    machines = [replaced.machines.get(machine.name, machine) for machine in incident.state.machines]
    await incident.change_machines(machines, leaving)
    for one in leaving:
        incident.state.evictions.approved.pop(one.machine, None)
    incident.timeline.note(Stage.EVICT, _exchanged(leaving, replaced))


async def _make_ready(incident: Incident, replaced: Replaced) -> list[Eviction]:
    """Start the job's fork server on its new machines; returns the machines where that failed."""
    new = replaced.machines
    joining = {machine.name for machine in new.values()}
    stay = [machine for machine in incident.state.machines if machine.name not in {*new, *joining}]
    ready = await asyncio.gather(*(_prepare(incident, machine, stay[:LIKE]) for machine in new.values()))
    return [one for one in ready if one is not None]


async def _prepare(incident: Incident, machine: Machine, like: list[Machine]) -> Eviction | None:
    """Return why a machine cannot join; None: it can. Its libraries must equal those of the machines in ``like``."""
    state, policy = incident.state, incident.state.spec.policy
    bound_s = max(policy.silence.evict_s, 1.0)
    try:
        job = state.placed.model_copy(update={"machines": [machine]})
        prepare = PrepareMachines(job=job, patience_s=bound_s, probed=True, like=like)
        await incident.unless_abandoned(start_activity(prepare))
    except ActivityError as error:
        why = f"it could not be made ready: {error.cause or error}"[:300]
        answer = EvictAnswer(rule=STANDBY_UNFIT, machine=machine.name, yes=True, why=why, reason=STANDBY_UNFIT)
        incident.state.evictions.record([answer])
        return Eviction(machine=machine.name, rule=STANDBY_UNFIT, reason=STANDBY_UNFIT, why=why)
    return None


def _exchanged(leaving: list[Eviction], replaced: Replaced) -> str:
    into = ", ".join(f"{machine.name} for {old}" for old, machine in replaced.machines.items())
    return f"{named(leaving)}; {into}"


def _names(evictions: list[Eviction]) -> set[str]:
    return {one.machine for one in evictions}
