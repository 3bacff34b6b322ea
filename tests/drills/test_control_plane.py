"""Faults outside the ranks: agents, fork servers, workers and Temporal itself are killed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
from temporalio.api.enums.v1 import EventType

from drills import DrillCluster, DrillResult
from drills.observe import transactions
from everstep.model.job_state import incident_workflow_id
from soaks.sweep import history

pytestmark = [pytest.mark.drill, pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(300)]

Recovered = Callable[..., None]
DrillOf = Callable[..., Awaitable[DrillResult]]

COMPLETED = EventType.EVENT_TYPE_WORKFLOW_TASK_COMPLETED


@pytest.mark.parametrize(
    ("stage", "moment"),
    [
        ("stop", "middle"),
        pytest.param("decide", "end", marks=pytest.mark.wide),
        pytest.param("reattempt", "middle", marks=pytest.mark.wide),
        pytest.param("reattempt", "end", marks=pytest.mark.wide),
        pytest.param("confirm", "middle", marks=pytest.mark.wide),
    ],
)
async def test_the_worker_dies_in_a_stage(
    drill: DrillOf, recovered: Recovered, cluster: DrillCluster, stage: str, moment: str
) -> None:
    result = await drill("kill-worker", ranks=[1], in_stage=stage, moment=moment)
    recovered(result)
    await transactions_are_those_of_the_store(cluster, incident_workflow_id(result.job, 1))


async def transactions_are_those_of_the_store(cluster: DrillCluster, workflow_id: str) -> None:
    """A sweep needs these facts: a real server's store has the whole history, and each task's commands with its end."""
    events = await history(cluster, workflow_id)
    described = await cluster.control.client.get_workflow_handle(workflow_id).describe()
    begins = transactions.begins(cluster.file.database, described.run_id)
    assert len(begins) == len(events)
    ends = {event.event_id for event in events if event.event_type == COMPLETED}
    assert ends
    for event, first in zip(events, begins, strict=True):
        attributes = getattr(event, event.WhichOneof("attributes") or "", None)
        assert event.event_id not in ends or first == event.event_id
        if task := getattr(attributes, "workflow_task_completed_event_id", 0):
            assert first == task


@pytest.mark.wide
async def test_workers_without_cpu_time_cost_little_more_than_that_time(drill: DrillOf, recovered: Recovered) -> None:
    recovered(await drill("freeze-workers", ranks=[1], seconds=20.0))


@pytest.mark.parametrize("stage", [pytest.param("stop", marks=pytest.mark.wide), "confirm"])
async def test_temporal_dies_in_a_stage(drill: DrillOf, recovered: Recovered, stage: str) -> None:
    recovered(await drill("kill-temporal", ranks=[1], in_stage=stage))


@pytest.mark.parametrize("fault", ["kill-agent", pytest.param("kill-forkserver", marks=pytest.mark.wide)])
async def test_ranks_go_on_without(drill: DrillOf, fault: str) -> None:
    # The steps are long enough that a busy machine completes some while the killed part is away.
    result = await drill(fault, machine="m1", steps=30, step_seconds=0.2)
    assert result.problems == []
    assert result.ok and result.fired
    assert result.resolution == "absorbed"
    assert result.incidents == [] and result.generations == 1
    assert result.steps_lost == 0 and result.steps_redone == 0
    assert result.losses_match is True
    assert result.recovered_s is not None and result.recovered_s > 0
    assert result.leaked == [] and result.duplicates == 0


async def test_an_agent_dies_in_the_middle_of_a_launch(drill: DrillOf, recovered: Recovered) -> None:
    """A launch ends some milliseconds after a rank was forked. So on a busy computer, the kill may come too late."""
    for _ in range(3):
        result = await drill("kill-agent", machine="m1", during="launch")
        if result.problems != ["the agent was not killed within the launch"]:
            break  # the agent was killed in time, or there is another problem
    recovered(result)
