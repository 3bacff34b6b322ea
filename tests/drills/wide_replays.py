"""A machine that computes wrongly in the job alone: each one in turn, and with a control plane that dies meanwhile."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from drills import DrillResult
from tests.drills.conftest import Clusters, DrillOf

pytestmark = [pytest.mark.drill, pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(600)]

WRONG: dict[str, Any] = {"only_in_job": True, "ranks_per_machine": 1, "at_step": 12, "steps": 40}
EIGHT = WRONG | {"machines": 8, "tp": 1, "pp": 1}


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def clusters() -> AsyncIterator[Clusters]:
    """One cluster, with one machine beside the eight of a job."""
    shared = Clusters(machines=9)
    yield shared
    assert await shared.close() == []


def found(result: DrillResult, machine: str) -> None:
    """The replay named it and nobody else, and training went on bit for bit."""
    assert result.problems == []
    assert (result.ok, result.resolution, result.evicted) == (True, "eviction", [machine])
    assert (result.losses_match, result.state_match, result.leaked) == (True, True, [])
    stages = [name for name, _ in result.stages]
    assert stages.index("diagnose") < stages.index("replay") < stages.index("evict")


@pytest.mark.parametrize("index", range(8))
async def test_each_machine_of_eight_is_found(drill: DrillOf, index: int) -> None:
    found(await drill("bitflip", machine=f"m{index}", **EIGHT), f"m{index}")


@pytest.mark.parametrize("sizes", [{"tp": 1, "pp": 2}, {"tp": 2, "pp": 1}, {"tp": 2, "pp": 1, "ranks_per_machine": 2}])
async def test_groups_keep_the_sizes_that_split_the_model(drill: DrillOf, sizes: dict[str, int]) -> None:
    found(await drill("bitflip", machine="m5", **(EIGHT | sizes)), "m5")


@pytest.mark.parametrize("part", ["kill-worker", "kill-temporal"])
@pytest.mark.parametrize("moment", ["begin", "middle", "end"])
async def test_the_control_plane_dies_in_a_replay(drill: DrillOf, part: str, moment: str) -> None:
    options = WRONG | {"machines": 4, "tp": 1, "pp": 1, "during": "bitflip", "in_stage": "replay", "moment": moment}
    found(await drill(part, machine="m1", **options), "m1")
