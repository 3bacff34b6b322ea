"""Drills with every machine, group and copy of every rank, for ``make drills``; they take too long for each change."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, get_args

import pytest

from drills import DrillResult
from drills.faults.damaged_copies import Where
from drills.spec.request import example

pytestmark = [pytest.mark.drill, pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(600)]

DrillOf = Callable[..., Awaitable[DrillResult]]
WHOLE: dict[str, Any] = {"machines": 4, "ranks_per_machine": 2, "tp": 2, "pp": 2, "at_step": 12, "steps": 36}
GROUPS = [(kind, index) for kind in ("tp", "pp", "dp") for index in range(4)]


def recovered(result: DrillResult) -> None:
    assert result.problems == []
    assert result.ok and result.losses_match is True
    assert result.steps_lost is not None and result.steps_promised is not None
    assert result.steps_lost <= result.steps_promised


@pytest.mark.parametrize("machine", ["m0", "m1", "m2", "m3"])
async def test_each_machine_is_lost(drill: DrillOf, machine: str) -> None:
    result = await drill("kill-machine", machine=machine, **WHOLE)
    recovered(result)
    assert result.steps_promised == 1


@pytest.mark.parametrize(("kind", "index"), GROUPS)
async def test_each_group_is_lost(drill: DrillOf, kind: str, index: int) -> None:
    result = await drill("kill-group", kind=kind, index=index, **WHOLE)
    recovered(result)
    assert result.steps_promised == 1


@pytest.mark.parametrize("where", get_args(Where))
@pytest.mark.parametrize("rank", range(8))
async def test_each_copy_is_damaged(drill: DrillOf, where: str, rank: int) -> None:
    recovered(await drill("flip-bit", where=where, ranks=[rank], **WHOLE))


@pytest.mark.parametrize("rank", range(8))
async def test_each_rank_is_killed_in_the_middle_of_a_save(drill: DrillOf, rank: int) -> None:
    result = await drill("kill-during-save", ranks=[rank], **WHOLE)
    assert result.problems == [] and result.losses_match is True


@pytest.mark.parametrize("machine", ["m0", "m1", "m2", "m3"])
@pytest.mark.parametrize("then", ["kill-rank", "kill-machine"])
async def test_each_agent_is_killed_before_its_copies_are_needed(drill: DrillOf, machine: str, then: str) -> None:
    recovered(await drill("kill-agent", machine=machine, then=then, **WHOLE))


@pytest.mark.parametrize("machine", ["m0", "m1", "m2", "m3"])
async def test_each_peer_is_killed_in_the_middle_of_a_backup(drill: DrillOf, machine: str) -> None:
    recovered(await drill("kill-peer", machine=machine, **WHOLE))


@pytest.mark.parametrize("moment", ["begin", "middle", "end"])
@pytest.mark.parametrize("stage", ["stop", "decide", "restore", "reattempt", "confirm"])
async def test_the_worker_dies_in_each_stage_of_a_lost_machine(drill: DrillOf, stage: str, moment: str) -> None:
    options = {"in_stage": stage, "moment": moment, "during": "kill-machine", "machine": "m2"}
    recovered(await drill("kill-worker", **options, **WHOLE))


HYBRID: dict[str, Any] = {
    "machines": 4,
    "ranks_per_machine": 1,
    "tp": None,
    "pp": None,
    "mesh": "dp_replicate=2,dp_shard=2",
    "groups": ["pair=2:dp_replicate+dp_shard"],
    "script": [str(example("fsdp2.py")), "--replicas", "2", "--dim", "16", "--heads", "2", "--steps", "36"],
    "at_step": 12,
}


@pytest.mark.parametrize("kind", ["dp_replicate", "dp_shard", "pair"])
@pytest.mark.parametrize("index", range(2))
async def test_each_group_of_a_mesh_of_other_axes_is_lost(drill: DrillOf, kind: str, index: int) -> None:
    """The job uses hybrid sharding, and has groups over several axes of the mesh."""
    result = await drill("kill-group", kind=kind, index=index, **HYBRID)
    recovered(result)
    assert result.steps_promised == 1
