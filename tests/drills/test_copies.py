"""Damaged copies and full file systems are named.

Then the job uses another copy, of the same or an earlier step, and never a wrong byte.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from controlplane.local import mounts
from drills import DrillResult

pytestmark = [pytest.mark.drill, pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(300)]

DrillOf = Callable[..., Awaitable[DrillResult]]
WentOn = Callable[..., None]


@pytest.fixture
def room_of_its_own(tmp_path: Path) -> None:
    """Skip the test if small file systems cannot be mounted here. The drill itself would end with exit code 3."""
    if said := mounts.why_not(tmp_path):
        pytest.skip(said)


@pytest.mark.parametrize(
    ("where", "restored_from", "lost"),
    [
        pytest.param(
            "buffer", {"own memory": 3, "backup": 1}, 0, marks=pytest.mark.wide
        ),  # the backup has the same step
        pytest.param("backup", {"own memory": 3, "backup": 1}, 1, marks=pytest.mark.wide),  # the earlier backup is used
        ("file", {"disk": 4}, 5),  # the earlier step on disk is used
    ],
)
async def test_a_bit_flips(
    spread: DrillOf, went_on: WentOn, where: str, restored_from: dict[str, int], lost: int
) -> None:
    result = await spread("flip-bit", where=where, ranks=[1])
    went_on(result, restored_from, lost=lost)
    assert result.steps_lost == result.steps_promised == lost
    assert "flipped" in result.damaged[0]


@pytest.mark.wide
async def test_a_file_is_cut_short(spread: DrillOf, went_on: WentOn) -> None:
    result = await spread("truncate-file", ranks=[2])
    went_on(result, {"disk": 4}, lost=5)
    assert result.steps_lost == 5
    assert "cut from" in result.damaged[0]


@pytest.mark.usefixtures("room_of_its_own")
async def test_a_job_without_room_for_its_checkpoints_is_parked(spread: DrillOf) -> None:
    result = await spread("shm-full", machine="m1")
    assert result.problems == [] and result.ok
    assert result.resolution == "parked"
    assert result.leaked == []


@pytest.mark.wide
@pytest.mark.usefixtures("room_of_its_own")
async def test_without_room_for_backups_the_disk_is_used(spread: DrillOf, went_on: WentOn) -> None:
    result = await spread("shm-full", fits="own", machine="m1")
    went_on(result, {"own memory": 3, "disk": 1}, lost=0)  # the other ranks still have the disk's step in memory
    assert result.emptied == ["m2"]
    assert any("no room for the backup" in text for text in result.said)


@pytest.mark.wide
@pytest.mark.usefixtures("room_of_its_own")
async def test_with_a_full_disk_an_older_checkpoint_is_used(spread: DrillOf, went_on: WentOn) -> None:
    result = await spread("disk-full", machine="m1")
    went_on(result, {"disk": 4}, lost=5, observed=1)
    assert result.steps_lost == 5
    assert any("No space" in text or "no room" in text for text in result.said)
