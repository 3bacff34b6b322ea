"""Reattempt: launch the next generation, and watch its ranks until they step.

The generation runs the present or another version of the job's code.
"""

from __future__ import annotations

from datetime import timedelta

from temporalio import workflow
from temporalio.exceptions import ActivityError

with workflow.unsafe.imports_passed_through():
    from activities.agents.confirm_steps import ConfirmSteps
    from activities.agents.launch_ranks import LaunchRanks
    from everstep.decisions.act.recover.confirm import confirm_bound_s
    from everstep.decisions.act.recover.plan import RestartPlan
    from everstep.decisions.act.recover.rules import backoff_s
    from everstep.decisions.act.versions.next_version import is_withdrawn
    from everstep.model.ladder import Rung
    from everstep.model.launch import Confirmation, Launched
    from everstep.model.stage import Stage
    from workflows.first_step import LEAST_BOUND_S
    from workflows.incident.incident import Incident
    from workflows.incident.stages.stop import impatient
    from workflows.start_activity import start_activity

MOST_CHECKS = 10
"""A restart is given up after this many checks without a result."""
FOUND_CHARACTERS = 300
"""The largest number of characters about one restart in a report."""


async def back_off(incident: Incident, plan: RestartPlan) -> bool:
    """Wait before a restart; returns whether the plan is still valid. Its version may have been withdrawn since the
    decision and during the restore."""
    if plan.verdict.delay_s:
        incident.timeline.enter(Stage.BACKOFF, plan.verdict.text)
        await incident.wait(timedelta(seconds=plan.verdict.delay_s), "BACKOFF")
    if plan.change is None or not is_withdrawn(plan.change, incident.state.book):
        return True
    incident.state.operator.resumed = plan.by_operator
    return False


async def reattempt(incident: Incident, plan: RestartPlan) -> Confirmation | None:
    """Restart the job once; returns the confirmation; None: it could not be launched or watched."""
    state, timeline, target = incident.state, incident.timeline, plan.restore
    notifying = None
    if plan.change is not None:
        notifying = incident.change_version(plan.change)
        state = incident.state
    state.attempts += 1
    if plan.rung is not None:
        rolls_back = plan.change is not None and plan.change.suspect
        rung = Rung.ROLLBACK if rolls_back else Rung.REATTEMPT
        state.ladder.add(rung, state.failures[-1], plan.verdict.text, path=plan.rung.path)
    began_s = workflow.time()
    state.record_launch(target)
    state.book.launched(state.generation, target.step, workflow.time_ns())
    launch = LaunchRanks(
        job=state.placed,
        generation=state.generation,
        resume_step=target.step,
        save_every=state.save_every,
        reason=incident.id,
        reshard_from=target.folder,
        origin=target.origin,
        **impatient(incident),
    )
    began = timeline.enter(Stage.REATTEMPT)
    try:
        launched = await incident.unless_abandoned(start_activity(launch))
        incident.state.launched = launched
        if notifying is not None:
            await notifying
        code = f", v{state.book.running}" if plan.change else ""
        timeline.leave(began, Stage.REATTEMPT, f"generation {launch.generation}{code} {target.origin}")
        began = timeline.enter(Stage.CONFIRM)
        confirmation = await _confirm(incident, launched, target.largest)
    except ActivityError as error:
        failed = f"failed: {error.cause or error}"
        timeline.leave(began, timeline.stage, failed)
        _note_result(incident, plan, failed, began_s)
        return None
    timeline.leave(began, Stage.CONFIRM, confirmation.reason)
    _note_result(incident, plan, confirmation.reason, began_s)
    if confirmation.ok:
        incident.first_step_s = workflow.time() - began if confirmation.confirmed else 0.0
    return confirmation


async def _confirm(incident: Incident, launched: Launched, state_bytes: int) -> Confirmation:
    """Watch the new generation until it steps; ``state_bytes`` is the size of the largest state that a rank restores.

    A check without a result does not stop the generation: the check is repeated.

    Raises:
        ActivityError: repeated checks gave no result.
    """
    state, policy = incident.state, incident.state.spec.policy

    async def check(bound_s: float) -> Confirmation:
        steps = ConfirmSteps(
            job=state.placed,
            launched=launched,
            timeout_s=bound_s,
            showing=state.showing,
            state_bytes=state_bytes,
            silent_s=policy.silence.detect_s if impatient(incident) else 0.0,
        )
        return await incident.unless_abandoned(start_activity(steps))

    bound_s = confirm_bound_s(state.first_step_s, policy)
    until = workflow.time() + bound_s
    for number in range(1, MOST_CHECKS):
        try:
            return await check(max(until - workflow.time(), LEAST_BOUND_S) if number > 1 else bound_s)
        except ActivityError as error:
            workflow.logger.warning("it is not known whether the ranks step", extra={"error": str(error)})
        await incident.wait(timedelta(seconds=max(backoff_s(number, policy), LEAST_BOUND_S)), "ASK AGAIN")
    return await check(LEAST_BOUND_S)


def _note_result(incident: Incident, plan: RestartPlan, found: str, since: float) -> None:
    """Note the result of a rung of the ladder."""
    if plan.rung is not None:
        incident.state.ladder.record_result(found[:FOUND_CHARACTERS], workflow.time() - since)
