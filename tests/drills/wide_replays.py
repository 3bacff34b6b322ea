"""A machine computes wrongly only in the job: each machine, not in each run, and with a control plane that dies."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from drills import DrillCluster, DrillResult
from drills.judge import facts
from everstep.model.job_state import replay_workflow_id
from everstep.model.ladder import Rung
from everstep.model.replay import ReplayConclusion, Replayed
from tests.drills.conftest import Clusters, DrillOf

pytestmark = [pytest.mark.drill, pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(600)]

WRONG: dict[str, Any] = {"only_in_job": True, "ranks_per_machine": 1, "at_step": 12, "steps": 40}
FOUR = WRONG | {"machines": 4, "tp": 1, "pp": 1}
EIGHT = WRONG | {"machines": 8, "tp": 1, "pp": 1}


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def clusters() -> AsyncIterator[Clusters]:
    """One cluster, with one spare machine for a job of eight."""
    shared = Clusters(machines=9)
    yield shared
    assert await shared.close() == []


def found(result: DrillResult, machine: str) -> None:
    """Check that the replay named only this machine, and that training continued with the same bits."""
    assert result.problems == []
    assert (result.ok, result.resolution, result.evicted) == (True, "eviction", [machine])
    assert (result.losses_match, result.state_match, result.leaked) == (True, True, [])
    stages = [name for name, _ in result.stages]
    assert stages.index("diagnose") < stages.index("replay") < stages.index("evict")


@pytest.mark.parametrize("index", range(8))
async def test_each_machine_of_eight_is_found(drill: DrillOf, index: int) -> None:
    found(await drill("bitflip", machine=f"m{index}", **EIGHT), f"m{index}")


@pytest.mark.parametrize("index", [0, 3, 7])
async def test_bits_that_no_loss_shows_are_found_by_comparing_them(
    drill: DrillOf, cluster: DrillCluster, index: int
) -> None:
    """The wrong numbers are finite. The rank that fails each time is on a healthy machine."""
    result = await drill("bitflip", machine=f"m{index}", finite=True, **EIGHT)
    found(result, f"m{index}")
    assert [rung for rung, _ in result.tried] == ["reattempt", "diagnose", "reattempt", "replay", "reattempt"]
    last = (await facts.incidents(cluster, result.job))[-1].report
    assert last is not None
    assert {one.machine for one in last.failures} == {f"m{(index + 1) % 8}"}, (
        "the failures are on a machine that is not at fault"
    )
    replayed = next(one for one in last.tried if one.rung is Rung.REPLAY)
    assert re.search(r"other bits than .*: the loss from step \d+ on", replayed.found)


@pytest.mark.parametrize("sizes", [{"tp": 1, "pp": 2}, {"tp": 2, "pp": 1}, {"tp": 2, "pp": 1, "ranks_per_machine": 2}])
async def test_groups_keep_the_sizes_that_split_the_model(drill: DrillOf, sizes: dict[str, int]) -> None:
    found(await drill("bitflip", machine="m5", **(EIGHT | sizes)), "m5")


@pytest.mark.parametrize("part", ["kill-worker", "drain-worker", "kill-temporal"])
@pytest.mark.parametrize("moment", ["begin", "middle", "end"])
async def test_the_control_plane_dies_in_a_replay(drill: DrillOf, part: str, moment: str) -> None:
    options = FOUR | {"during": "bitflip", "in_stage": "replay", "moment": moment}
    found(await drill(part, machine="m1", **options), "m1")


async def test_what_shows_in_a_later_run_only_is_found_there(drill: DrillOf, cluster: DrillCluster) -> None:
    """The fault shows in every second run: not in the first repeat of both phases, but in the second repeat."""
    result = await drill("bitflip", machine="m1", shows_every=2, **FOUR)
    found(result, "m1")
    replay = cluster.control.client.get_workflow_handle(replay_workflow_id(result.job, 2, 1), result_type=Replayed)
    said = await replay.result()
    assert (said.found, said.suspects, said.repeats) == (ReplayConclusion.ONE, ["m1"], 2)


async def test_what_shows_in_no_replay_is_told_with_the_probability_of_missing_it_and_nobody_leaves(
    drill: DrillOf, cluster: DrillCluster
) -> None:
    result = await drill("bitflip", machine="m1", shows_every=0, **FOUR)
    assert result.problems == []
    assert (result.ok, result.resolution, result.evicted, result.leaked) == (True, "parked", [], [])
    reports = [incident.report for incident in await facts.incidents(cluster, result.job) if incident.report]
    said = {one.found for report in reports for one in report.tried if one.rung is Rung.REPLAY}
    assert said and all(text.startswith("not reproduced on groups of 2 machines in 4 runs") for text in said)
    assert all("missed with probability 0.062" in text for text in said)
