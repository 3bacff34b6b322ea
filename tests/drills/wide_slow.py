"""Steps take longer than before, and the slow machine leaves, even if the control plane dies during the vote.

If the job itself is the cause, no machine leaves.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from drills import DrillResult
from drills.spec.settings import SLOW_AT, SLOW_STEPS
from tests.drills.conftest import Clusters, DrillOf

JOB: dict[str, Any] = {"machines": 4, "ranks_per_machine": 1, "tp": 1, "pp": 1, "at_step": SLOW_AT}
JOB["steps"] = SLOW_AT + SLOW_STEPS

pytestmark = [pytest.mark.drill, pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(600)]


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def clusters() -> AsyncIterator[Clusters]:
    """One cluster, with four machines for a job and a fifth one."""
    shared = Clusters(machines=5)
    yield shared
    assert await shared.close() == []


def found(result: DrillResult, machine: str) -> None:
    """Check that the vote named the machine, that it was evicted, and that no step was lost."""
    assert result.problems == []
    assert (result.ok, result.resolution, result.evicted, result.steps_lost) == (True, "eviction", [machine], 0)
    assert (result.losses_match, result.state_match, result.leaked) == (True, True, [])
    assert result.stages[0][0] == "vote"


@pytest.mark.parametrize("machine", ["m0", "m2"])
async def test_a_machine_has_little_cpu(drill: DrillOf, machine: str) -> None:
    found(await drill("slow-machine", machine=machine, **JOB), machine)


@pytest.mark.parametrize("part", ["kill-worker", "kill-temporal"])
async def test_the_control_plane_dies_in_a_vote(drill: DrillOf, part: str) -> None:
    found(await drill(part, machine="m1", during="slow-machine", in_stage="vote", **JOB), "m1")


async def test_a_job_with_uneven_work_loses_no_machine(drill: DrillOf) -> None:
    result = await drill("uneven-work", ranks=[1], **JOB)
    assert result.problems == []
    assert (result.ok, result.evicted, result.steps_lost, result.generations) == (True, [], 0, 1)
