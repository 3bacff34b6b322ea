"""The replay: a job's script runs on groups of its machines, by rows and by columns, until the faulty machine is known.

This is Algorithm 1 of ByteRobust, section 6. The replay is a child of an incident, with a page of its own. Each group
is one activity, so no finished group is repeated if a worker dies in the middle of a phase. After each repeat of both
phases the replay continues as new: at 4,096 machines, dozens of repeats have more events than a history may have.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NoReturn

from temporalio import workflow
from temporalio.exceptions import ActivityError

with workflow.unsafe.imports_passed_through():
    from activities.agents.replay_on_group import ReplayOnGroup
    from everstep.base.text import listed
    from everstep.decisions.act.recover.confirm import confirm_bound_s
    from everstep.decisions.blame.replay.compare_groups import conclude, is_settled, judge_runs
    from everstep.decisions.blame.replay.group_jobs import plan_of, repeats_of, spec_of_group
    from everstep.decisions.blame.replay.groups import ReplayGroup, ReplayPhase, ReplayPlan
    from everstep.decisions.blame.replay.kept_runs import fold
    from everstep.model.job import PlacedJob
    from everstep.model.job_state import job_workflow_id
    from everstep.model.replay import GroupRun, ReplayConclusion, Replayed, RunEnd
    from workflows import web_ui
    from workflows.messages import ReplayCarried, ReplayInput
    from workflows.start_activity import TASK_TIMEOUT, start_activity

ROWS = 24
"""The largest number of groups on the page; groups with a fault are first."""
LINE = 120
"""The largest number of characters in the result of a group."""


@workflow.defn(name="Replay")
class ReplayWorkflow:
    """The replay of one incident's job."""

    @workflow.init
    def __init__(self, input: ReplayInput) -> None:
        self._input = input
        self._plan = plan_of(input.spec)
        self._names = [machine.name for machine in input.machines]
        self._carried = input.carried or ReplayCarried(repeat=0, began=workflow.time())
        self._runs = list(self._carried.runs)
        self._seen = False
        """Whether groups showed a fault, but the results do not agree on a machine."""
        self._now = ""
        self._given_up = False

    @workflow.signal(name="give_up", description="Sent by its incident, which is over")
    def give_up(self) -> None:
        """End the running groups, and return the result so far."""
        self._given_up = True

    @workflow.run
    async def run(self, input: ReplayInput) -> Replayed:
        """Run both phases, repeat them if no machine is known to be faulty, and return the faulty machines."""
        self._seen = self._is_inconsistent(self._concluded()) if self._runs else False
        repeat, showing = self._carried.repeat + 1, asyncio.create_task(self._keep_shown())
        for phase in self._plan.phases:
            await self._phase(phase, repeat)
        result = self._concluded()
        self._seen = self._is_inconsistent(result)
        if not (is_settled(result) or self._given_up or repeat >= self._repeats):
            self._renew(repeat)
        showing.cancel()
        result = result.model_copy(update={"seconds": round(workflow.time() - self._carried.began, 3)})
        self._show(result)
        return result

    def _renew(self, repeat: int) -> NoReturn:
        """Continue as new. No activity may run at this point. The conclusions from the folded trials are the same."""
        carried = ReplayCarried(repeat=repeat, began=self._carried.began, runs=fold(self._runs))
        workflow.continue_as_new(self._input.model_copy(update={"carried": carried}), task_timeout=TASK_TIMEOUT)

    def _concluded(self) -> Replayed:
        shows = self._input.spec.policy.replay.fault_share
        return conclude(self._plan, self._names, self._runs, shows=shows)

    def _is_inconsistent(self, result: Replayed) -> bool:
        return result.found is ReplayConclusion.INCONSISTENT

    @property
    def _repeats(self) -> int:
        return repeats_of(self._input.spec.policy, self._runs, seen=self._seen)

    async def _phase(self, phase: ReplayPhase, repeat: int) -> None:
        """Run all groups of a phase at once, except groups that share a machine."""
        for number, wave in enumerate(phase.waves, 1):
            if self._given_up:
                return
            part = f", part {number} of {len(phase.waves)}" if len(phase.waves) > 1 else ""
            self._now = f"{phase.name}, run {repeat} of at most {self._repeats}{part}"
            await asyncio.gather(*(self._group(group, repeat) for group in wave))

    async def _group(self, group: ReplayGroup, repeat: int) -> None:
        input, policy = self._input, self._input.spec.policy
        machines = [input.machines[x] for x in group.machines]
        request = ReplayOnGroup(
            job=PlacedJob(spec=spec_of_group(input.spec, group), machines=machines, run=input.run),
            group=group.name,
            repeat=repeat,
            steps=policy.replay.steps,
            start_s=confirm_bound_s(input.first_step_s, policy),
            limit_s=policy.replay.timeout_s,
        )
        running = start_activity(request)
        over = asyncio.create_task(workflow.wait_condition(lambda: self._given_up))
        await workflow.wait([running, over], return_when=asyncio.FIRST_COMPLETED)
        over.cancel()
        if not running.done():
            running.cancel()
        try:
            done = await running
        except ActivityError as error:
            if workflow.cancellation_reason() is not None:
                raise
            names, why = [machine.name for machine in machines], f"{error.cause or error}"[:300]
            done = GroupRun(group=group.name, machines=names, end=RunEnd.UNABLE, repeat=repeat, why=why)
        self._runs.append(done)

    async def _keep_shown(self) -> None:
        """Update the page once for all groups that end together, because judging many trials takes long."""
        while True:
            shown = (len(self._runs), self._now)
            self._show()
            await workflow.wait_condition(lambda: shown != (len(self._runs), self._now))  # noqa: B023 - asked here only

    def _show(self, found: Replayed | None = None) -> None:
        """Update the page."""
        shown, now, namespace = found or self._concluded(), "" if found else self._now, workflow.info().namespace
        page = _page(self._input, self._plan, self._runs, shown, now=now, namespace=namespace)
        workflow.set_current_details(page)


def _page(
    input: ReplayInput, plan: ReplayPlan, runs: Sequence[GroupRun], found: Replayed, *, now: str, namespace: str
) -> str:
    """Return the page.

    Args:
        input: The input of the replay.
        plan: The groups of the replay.
        runs: The finished trials.
        found: The result so far.
        now: What runs now; empty: the replay is over.
        namespace: The namespace of Temporal, for the link to the job.
    """
    steps, of_machines = input.spec.policy.replay.steps, web_ui.count(plan.size, "machine")
    headline = f"## {now}" if now else f"## {found.text}"
    explanation = (
        f"`{input.spec.script}` from its beginning, {steps} steps, on groups of {of_machines}: each machine is in one "
        f"row and in one column, {plan.count} of each. A group that fails, or computes other bits than the "
        "other groups, has a faulty machine. A machine that is in two such groups is the faulty one."
    )
    why = f"Why: {input.why}" if input.why else ""
    link = web_ui.link("Job", namespace, job_workflow_id(input.job))
    parts = [headline, explanation, why, _table(input, plan, runs), link]
    return "\n\n".join(part for part in parts if part)[: web_ui.PAGE_CHARACTERS]


def _table(input: ReplayInput, plan: ReplayPlan, runs: Sequence[GroupRun]) -> str:
    judged = judge_runs(plan, runs)
    names = [machine.name for machine in input.machines]
    groups = sorted(plan.groups, key=lambda group: judged[group.name].faulty is not True)
    rows = []
    for group in groups[:ROWS]:
        own = [run for run in runs if run.group == group.name]
        if not own:
            continue
        verdict = judged[group.name]
        shows = "the same as the other groups" if verdict.faulty is False else verdict.why[:LINE].replace("|", "/")
        took_s = sum(run.seconds for run in own)
        mark = "**" if verdict.faulty else ""
        machines = listed([names[x] for x in group.machines], 6)
        rows.append([f"{mark}{group.name}{mark}", machines, web_ui.seconds(took_s), f"{mark}{shows}{mark}"])
    return web_ui.table(["Group", "Machines", "Took", "Result"], rows) if rows else ""
