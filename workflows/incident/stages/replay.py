"""Replay: run the script on groups of the job's machines, twice, and compare the groups.

A machine at fault leaves by a rule of eviction; if there is none, the ladder continues.
"""

from __future__ import annotations

import contextlib

from temporalio import workflow
from temporalio.exceptions import ChildWorkflowError, FailureError

with workflow.unsafe.imports_passed_through():
    from everstep.decisions.act.recover.plan import RestartPlan
    from everstep.decisions.blame.replay.compare_groups import findings_of_replay
    from everstep.decisions.blame.replay.group_jobs import plan_of, repeats_of
    from everstep.model.job_state import replay_workflow_id
    from everstep.model.ladder import Rung
    from everstep.model.replay import ReplayConclusion, Replayed
    from everstep.model.stage import Stage
    from workflows import attributes, web_ui
    from workflows.incident.incident import Abandoned, Incident
    from workflows.messages import ReplayInput
    from workflows.replay import ReplayWorkflow
    from workflows.start_activity import TASK_TIMEOUT


async def replay(incident: Incident, plan: RestartPlan) -> None:
    """Replay the job; the result is kept in the state of the incident.

    Raises:
        Abandoned: an operator ended the incident.
    """
    state, timeline = incident.state, incident.timeline
    groups, policy = plan_of(state.spec), state.spec.policy
    text = (
        f"{policy.replay.steps} steps of the script, from its beginning, on {groups.count} rows and {groups.count} "
        f"columns of {web_ui.count(groups.size, 'machine')}, at most {repeats_of(policy)} times"
    )
    state.page.replays += 1
    began = timeline.enter(Stage.REPLAY, text)
    await incident.notify_job()
    found = await _replayed(incident, plan)
    state.ladder.tested += findings_of_replay(found)
    state.ladder.add(
        Rung.REPLAY,
        state.failures[-1],
        plan.verdict.text,
        path=plan.rung.path if plan.rung else "",
        found=found.text,
        seconds=workflow.time() - began,
    )
    timeline.leave(began, Stage.REPLAY, found.text)
    timeline.note(Stage.REPLAY, found.text)


async def _replayed(incident: Incident, plan: RestartPlan) -> Replayed:
    state = incident.state
    replay_input = ReplayInput(
        job=state.job,
        spec=incident.state.spec,
        machines=state.machines,
        run=state.run,
        why=plan.verdict.text,
        first_step_s=max(state.first_step_s, incident.first_step_s),
    )
    child = await workflow.start_child_workflow(
        ReplayWorkflow.run,
        replay_input,
        id=replay_workflow_id(state.job, state.number, incident.state.page.replays),
        task_timeout=TASK_TIMEOUT,
        parent_close_policy=workflow.ParentClosePolicy.REQUEST_CANCEL,
        static_summary=web_ui.summary(f"replay of {state.job}: {plan.verdict.text}"),
        search_attributes=attributes.search_attributes({attributes.JOB_NAME: state.job}),
    )
    try:
        return await incident.unless_abandoned_child(child)
    except Abandoned:
        # The child is not cancelled: if it ended at that moment, the task that cancels it would fail for ever.
        with contextlib.suppress(FailureError):
            await child.signal(ReplayWorkflow.give_up)
        raise
    except ChildWorkflowError as error:
        return Replayed(
            found=ReplayConclusion.UNABLE, text=f"not known: it was ended from outside: {error.cause or error}"[:300]
        )
