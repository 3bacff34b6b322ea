"""The replay workflow, on a real server. Each task replays the history from the start, and each repeat is a run."""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import pytest
from temporalio import activity
from temporalio.api.sdk.v1 import WorkflowMetadata
from temporalio.client import Client, WorkflowHistory
from temporalio.exceptions import ApplicationError
from temporalio.worker import Replayer, Worker

from activities.agents.replay_on_group import ReplayOnGroup
from activities.heartbeat import heartbeating
from activities.payloads import DATA_CONVERTER
from everstep.decisions.blame.replay.group_jobs import repeats_of
from everstep.decisions.blame.replay.groups import plan_replay
from everstep.decisions.blame.replay.kept_runs import bounded
from everstep.model.job import JobSpec
from everstep.model.machine import Machine
from everstep.model.recovery_policy import RecoveryPolicy
from everstep.model.replay import GroupRun, ReplayConclusion, Replayed, RunEnd
from tests.workflows.answers import computed_alike
from workflows.messages import ReplayInput
from workflows.registry import WORKFLOWS, sandbox
from workflows.replay import ReplayWorkflow

Group = Callable[[ReplayOnGroup], Awaitable[GroupRun]]


@dataclass
class Carried:
    """The results of a replay that has ended."""

    found: Replayed
    begun: Counter[str]
    """``group/repeat`` → how often the group began in that repeat."""
    histories: list[WorkflowHistory]
    """The histories of the workflow's runs, the newest first."""
    page: str


NAN: dict[str, Any] = {"end": RunEnd.NOT_FINITE, "why": "at step 2"}


def wrong_on(machine: str, given: ReplayOnGroup) -> GroupRun:
    """Answer that each group with the machine has a loss that is not finite."""
    found = computed_alike(given)
    return found.model_copy(update=NAN) if machine in found.machines else found


async def replayed(temporal: Client, machines: int, group: Group, **policy: Any) -> Carried:
    """Replay a job on a number of machines. ``group`` gives the answer for each group."""
    begun: Counter[str] = Counter()

    @activity.defn(name=ReplayOnGroup.name)
    async def replay_group(given: ReplayOnGroup) -> GroupRun:
        begun[f"{given.group}/{given.repeat}"] += 1
        return await group(given)

    queue = f"q-{uuid.uuid4().hex[:8]}"
    spec = JobSpec(name="gpt", script="/job.py", machines=machines, policy=RecoveryPolicy(**policy))
    names = [Machine(name=f"m{x}", address=f"127.0.0.1:{x + 1}") for x in range(machines)]
    async with Worker(
        temporal,
        task_queue=queue,
        workflows=list(WORKFLOWS),
        activities=[replay_group],
        workflow_runner=sandbox(),
        max_cached_workflows=0,
    ):
        handle = await temporal.start_workflow(
            ReplayWorkflow.run,
            ReplayInput(job="gpt", spec=spec, machines=names, run="r1", first_step_s=8.0),
            id=f"replay/{queue}",
            task_queue=queue,
        )
        found = await handle.result()
        newest = temporal.get_workflow_handle(handle.id)
        shown: WorkflowMetadata = await newest.query("__temporal_workflow_metadata", result_type=WorkflowMetadata)
        run = (await newest.describe()).run_id
    histories = []
    while run:
        histories.append(await temporal.get_workflow_handle(handle.id, run_id=run).fetch_history())
        run = histories[-1].events[0].workflow_execution_started_event_attributes.continued_execution_run_id
    return Carried(found, begun, histories, shown.current_details)


REPEATED = {"replay": {"fault_share": 0.2, "miss_probability": 0.1}}
"""A policy with which both phases are run at most six times."""


@pytest.mark.parametrize("repeat", [1, 2])
async def test_a_worker_that_dies_in_the_middle_of_a_phase_repeats_no_group_that_is_over(
    temporal: Client, repeat: int
) -> None:
    """The worker of row 2 becomes silent, as if it were killed. Only this group begins again."""
    dead = asyncio.Event()

    async def group(given: ReplayOnGroup) -> GroupRun:
        if (given.group, given.repeat) == ("row 2", repeat) and activity.info().attempt == 1:
            await dead.wait()
        async with heartbeating():
            return wrong_on("m5", given) if given.repeat == repeat else computed_alike(given)

    over = await replayed(temporal, 8, group, **REPEATED)
    dead.set()
    assert (over.found.found, over.found.suspects) == (ReplayConclusion.ONE, ["m5"])
    assert over.begun.pop(f"row 2/{repeat}") == 2
    assert set(over.begun.values()) == {1} and len(over.begun) == 8 * repeat - 1


async def test_phases_are_repeated_while_nothing_shows_and_no_longer(temporal: Client) -> None:
    async def later(given: ReplayOnGroup) -> GroupRun:
        return wrong_on("m3", given) if given.repeat == 2 else computed_alike(given)

    assert repeats_of(RecoveryPolicy(**REPEATED)) > 2
    over = await replayed(temporal, 8, later, **REPEATED)
    assert (over.found.found, over.found.suspects, over.found.repeats) == (ReplayConclusion.ONE, ["m3"], 2)
    assert len(over.begun) == 16


async def test_other_bits_name_a_machine_once_they_showed_again(temporal: Client) -> None:
    async def group(given: ReplayOnGroup) -> GroupRun:
        found = computed_alike(given)
        return found.model_copy(update={"losses": [given.group]}) if "m3" in found.machines else found

    over = await replayed(temporal, 8, group, replay={"fault_share": 1.0})
    assert (over.found.found, over.found.suspects, over.found.repeats) == (ReplayConclusion.ONE, ["m3"], 2)


@pytest.mark.history("replay-continued")
async def test_repeats_have_short_histories_of_their_own_and_one_page_tells_of_all(temporal: Client) -> None:
    """Results of the first repeat count in the last one."""

    async def group(given: ReplayOnGroup) -> GroupRun:
        found = bounded(computed_alike(given).model_copy(update={"seconds": 10.0, "states": ["s"] * 3000}))
        if (given.group, given.repeat) in {("row 2", 2), ("column 1", 5)}:
            return found.model_copy(update=NAN)
        if (given.group, given.repeat) == ("row 1", 1):
            raise ApplicationError("no room", non_retryable=True)
        return bounded(found)

    over = await replayed(temporal, 9, group, **REPEATED)
    assert (over.found.found, over.found.suspects, over.found.repeats) == (ReplayConclusion.ONE, ["m7"], 5)
    assert len(over.histories) == 5 and set(over.begun.values()) == {1}
    sizes = [history_bytes(history) for history in over.histories]
    assert max(sizes) < 2 * sizes[-1], "no later run has a much larger history than the first"
    assert "**row 2**" in over.page and "50.00" in over.page and "40.00" in over.page
    replayer = Replayer(workflows=WORKFLOWS, data_converter=DATA_CONVERTER, workflow_runner=sandbox())
    for history in over.histories:
        await replayer.replay_workflow(history)


def history_bytes(history: WorkflowHistory) -> int:
    return sum(event.ByteSize() for event in history.events)


@pytest.mark.parametrize("again", [True, False])
async def test_a_group_that_does_not_start_is_tried_again(temporal: Client, again: bool) -> None:
    """The group is tried again in a second repeat, although the policy allows only one repeat otherwise."""
    bounds = set[tuple[float, float]]()

    async def group(given: ReplayOnGroup) -> GroupRun:
        bounds.add((given.start_s, given.limit_s))
        found = computed_alike(given)
        late = {"end": RunEnd.NOT_STARTED, "losses": [], "states": []}
        is_late = "m3" in found.machines and (again or given.repeat == 1)
        return found.model_copy(update=late) if is_late else found

    policy = {"replay": {"fault_share": 1.0, "timeout_s": 7.0}, "confirm": {"timeout_s": 11.0, "factor": 2.0}}
    over = await replayed(temporal, 6, group, **policy)
    said = (ReplayConclusion.ONE, ["m3"]) if again else (ReplayConclusion.NOTHING, [])
    assert (over.found.found, over.found.suspects, over.found.repeats) == (*said, 2)
    assert bounds == {(16.0, 7.0)}, "the start may take twice as long as the job's, and the steps have their own limit"


async def test_groups_that_share_a_machine_do_not_run_at_once(temporal: Client) -> None:
    running, most = Counter[str](), list[int]()

    async def group(given: ReplayOnGroup) -> GroupRun:
        names = [machine.name for machine in given.job.machines]
        running.update(names)
        most.append(max(running.values()))
        await asyncio.sleep(0.2)
        running.subtract(names)
        return wrong_on("m0", given)

    over = await replayed(temporal, 7, group, replay={"machines": 2})
    assert any(len(phase.waves) > 1 for phase in plan_replay(7, 2).phases)
    assert max(most) == 1
    assert (over.found.found, over.found.suspects) == (ReplayConclusion.ONE, ["m0"])


async def test_a_group_that_cannot_be_run_accuses_nobody(temporal: Client) -> None:
    async def group(given: ReplayOnGroup) -> GroupRun:
        if given.group == "row 0":
            raise ApplicationError("no room", non_retryable=True)
        return computed_alike(given)

    found = (await replayed(temporal, 4, group, replay={"fault_share": 1.0, "timeout_s": 1.0})).found
    assert (found.found, found.suspects) == (ReplayConclusion.INCOMPLETE, []) and "row 0" in found.text
