"""The control plane dies at the begin, in the middle and at the end of a stage of the ladder: no work is done twice.

Other files have the other stages of an incident: ``test_control_plane.py``, ``wide.py`` (stop, restore, reattempt,
confirm), ``wide_evictions.py`` (evict, prepare, await), ``wide_slow.py`` (vote), ``wide_replays.py`` (replay), and
``test_updates.py`` (make, try, align).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from temporalio.worker import Replayer

from drills import DrillCluster, DrillResult
from drills.spec.stages import MOMENTS, STAGES
from everstep.model.job_state import job_workflow_id
from everstep.rank import drill_faults as faults
from tests.drills.conftest import Clusters, DrillOf
from workflows.registry import WORKFLOWS, sandbox

pytestmark = [pytest.mark.drill, pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(600)]

PARTS = ("kill-worker", "drain-worker", "kill-temporal")
JOB: dict[str, Any] = {"machines": 4, "ranks_per_machine": 1, "tp": 1, "pp": 1, "at_step": 12, "steps": 40}
ENDED_EARLY = "a diagnosis is ended"
"""An agent logs this of a diagnosis that was stopped before its end."""


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def clusters() -> AsyncIterator[Clusters]:
    """One cluster, with one spare machine for a job of four."""
    shared = Clusters(machines=5)
    yield shared
    assert await shared.close() == []


def recovered(result: DrillResult, resolution: str, *tried: str, evicted: str = "") -> None:
    """Check that the job recovered as it should, by exactly these rungs, and that the training has the same bits."""
    assert result.problems == []
    assert (result.ok, result.fired, result.resolution) == (True, True, resolution)
    assert result.evicted == ([evicted] if evicted else []) and result.over_evicted == []
    assert [rung for rung, _ in result.tried] == list(tried)
    assert (result.losses_match, result.state_match) == (True, True)
    assert (result.duplicates, result.leaked) == (0, [])


async def struck(cluster: DrillCluster, result: DrillResult, stage: str, moment: str, *, launch: int = 0) -> None:
    """Check that the fault struck while the stage's activity ran, and that every begun activity was completed.

    The check also replays the histories, since no workflow may have acted before its history was written. ``launch``:
    which launch in the incidents the fault struck, from 0.
    """
    activity = STAGES[stage]
    marked = faults.fired(cluster.worker_plan, {"id": f"{result.fault}-{result.job}"})
    assert marked is not None and marked["place"] == f"{moment} of {activity}"
    begun: dict[tuple[str, int], int] = {}
    over: dict[tuple[str, int], int] = {}
    client = cluster.control.client
    replayer = Replayer(workflows=WORKFLOWS, data_converter=client.data_converter, workflow_runner=sandbox())
    await replayer.replay_workflow(await client.get_workflow_handle(job_workflow_id(result.job)).fetch_history())
    for incident in result.incidents:
        history = await client.get_workflow_handle(incident).fetch_history()
        await replayer.replay_workflow(history)
        for event in history.events:
            at_ns = event.event_time.ToNanoseconds()
            if event.activity_task_scheduled_event_attributes.activity_type.name == activity:
                begun[incident, event.event_id] = at_ns
            elif of := event.activity_task_completed_event_attributes.scheduled_event_id:
                over[incident, of] = at_ns
    assert set(begun) <= set(over), "each begun activity was completed"
    if stage != "decide":  # this activity is called at each stage, so another call may have been struck
        key = list(begun)[launch]
        assert begun[key] <= marked["time_ns"] <= over[key]


def ended_early(cluster: DrillCluster) -> int:
    """Return how many diagnoses the agents have stopped before their end."""
    return sum(log.read_text(errors="replace").count(ENDED_EARLY) for log in (cluster.home / "logs").glob("agent-*"))


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("moment", MOMENTS)
async def test_while_machines_are_tested(drill: DrillOf, cluster: DrillCluster, part: str, moment: str) -> None:
    """Agents continue their tests, and the next worker that asks gets the results of these tests."""
    before = ended_early(cluster)
    result = await drill(part, during="bitflip", machine="m1", in_stage="diagnose", moment=moment, **JOB)
    recovered(result, "eviction", "diagnose", "reattempt", evicted="m1")
    await struck(cluster, result, "diagnose", moment)
    assert [name for name, _ in result.stages].count("diagnose") == 1
    assert ended_early(cluster) == before, "no diagnosis was stopped, so no test ran twice"


@pytest.mark.parametrize("moment", MOMENTS)
async def test_temporal_while_it_is_decided(drill: DrillOf, cluster: DrillCluster, moment: str) -> None:
    result = await drill("kill-temporal", ranks=[1], in_stage="decide", moment=moment, **JOB)
    recovered(result, "reattempt", "reattempt")
    await struck(cluster, result, "decide", moment)
    assert (len(result.incidents), result.generations) == (1, 2)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("moment", MOMENTS)
async def test_while_code_is_taken_back(drill: DrillOf, cluster: DrillCluster, part: str, moment: str) -> None:
    result = await drill(part, during="bad-version", in_stage="rollback", moment=moment, **(JOB | {"steps": 60}))
    recovered(result, "rollback", "reattempt", "rollback")
    await struck(cluster, result, "rollback", moment, launch=1)
    assert (len(result.incidents), result.generations) == (2, 3)


@pytest.mark.parametrize("moment", MOMENTS)
async def test_temporal_while_it_is_launched_again(drill: DrillOf, cluster: DrillCluster, moment: str) -> None:
    result = await drill("kill-temporal", ranks=[1], in_stage="reattempt", moment=moment, **JOB)
    recovered(result, "reattempt", "reattempt")
    await struck(cluster, result, "reattempt", moment)
    assert (len(result.incidents), result.generations) == (1, 2)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("moment", MOMENTS)
async def test_while_ranks_that_hang_are_looked_at(
    drill: DrillOf, cluster: DrillCluster, part: str, moment: str
) -> None:
    slow = JOB | {"step_seconds": 0.2}  # even on a busy computer, the backup of the previous step is complete
    result = await drill(part, during="stop-rank", ranks=[1], in_stage="trace", moment=moment, **slow)
    recovered(result, "eviction", "reattempt", evicted="m1")
    await struck(cluster, result, "trace", moment)
