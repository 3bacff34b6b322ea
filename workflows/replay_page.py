"""The page of a replay: the groups, what each group showed, and the faulty machines."""

from __future__ import annotations

from collections.abc import Sequence

from everstep.base.text import listed
from everstep.decisions.blame.replay.compare_groups import judge_runs
from everstep.decisions.blame.replay.groups import ReplayPlan
from everstep.model.job_state import job_workflow_id
from everstep.model.replay import GroupRun, Replayed
from workflows import web_ui
from workflows.messages import ReplayInput

ROWS = 24
"""The largest number of groups on the page, those with a fault first."""
LINE = 120


def page(
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
    told = (
        f"`{input.spec.script}` from its beginning, {steps} steps, on groups of {of_machines}: each machine is in one "
        f"row and in one column, {plan.count} of each. A group that breaks, or computes other bits than the others, "
        "has a machine at fault; who is in both is it."
    )
    why = f"Why: {input.why}" if input.why else ""
    link = web_ui.link("Job", namespace, job_workflow_id(input.job))
    parts = [headline, told, why, _table(input, plan, runs), link]
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
        said = "as the others" if verdict.faulty is False else verdict.why[:LINE].replace("|", "/")
        took = sum(run.seconds for run in own)
        mark = "**" if verdict.faulty else ""
        machines = listed([names[x] for x in group.machines], 6)
        rows.append([f"{mark}{group.name}{mark}", machines, web_ui.seconds(took), f"{mark}{said}{mark}"])
    return web_ui.table(["Group", "Machines", "Took", "What it showed"], rows) if rows else ""
