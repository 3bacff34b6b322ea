"""Machines are lost with all their data. The job continues from backups on other machines, with the same bits."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from drills import DrillResult

pytestmark = [pytest.mark.drill, pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(300)]

DrillOf = Callable[..., Awaitable[DrillResult]]
WentOn = Callable[..., None]


async def test_the_machine_of_the_rendezvous_store_is_lost(spread: DrillOf, went_on: WentOn) -> None:
    result = await spread("kill-machine", machine="m0")
    went_on(result, {"own memory": 3, "backup": 1}, lost=1)
    assert result.steps_promised == 1
    assert result.emptied == ["m0"]
    # Ranks that wait for the store may count as hanging before the machine's silence is noticed. Then they are traced.
    stages = [name for name, _ in result.stages if name != "trace"]
    assert stages == ["stop", "decide", "restore", "reattempt", "confirm"]


@pytest.mark.wide
async def test_a_whole_pipeline_of_the_mesh_is_lost(drill: DrillOf, went_on: WentOn) -> None:
    whole = {"machines": 4, "ranks_per_machine": 2, "tp": 2, "pp": 2, "at_step": 10, "steps": 22}
    result = await drill("kill-group", kind="pp", index=0, **whole)
    went_on(result, {"own memory": 4, "backup": 4}, lost=1)
    assert result.emptied == ["m0", "m2"]
    assert result.steps_promised == 1 and "every backup is outside" in result.promise


@pytest.mark.wide
async def test_all_machines_are_lost_and_the_disk_is_what_is_left(drill: DrillOf) -> None:
    result = await drill("kill-group", kind="dp", machines=2, ranks_per_machine=1, tp=1, at_step=11)
    assert result.problems == [] and result.ok
    assert result.emptied == ["m0", "m1"]
    assert result.restored_from == {"disk": 2}
    assert result.losses_match is True
    assert result.steps_redone is not None and result.steps_promised is not None
    assert result.steps_redone <= result.steps_promised


@pytest.mark.wide
@pytest.mark.parametrize("part", ["kill-worker", "kill-temporal"])
async def test_the_control_plane_dies_while_copies_are_moved(spread: DrillOf, went_on: WentOn, part: str) -> None:
    result = await spread(part, in_stage="restore", during="kill-machine", machine="m2")
    went_on(result, {"own memory": 3, "backup": 1}, lost=1)


@pytest.mark.wide
async def test_an_agent_that_was_restarted_still_knows_the_saves(spread: DrillOf, went_on: WentOn) -> None:
    result = await spread("kill-agent", then="kill-rank", machine="m1", at_step=6)
    went_on(result, {"own memory": 4}, lost=0)


@pytest.mark.wide
async def test_an_agent_that_was_restarted_takes_and_sends_backups_again(spread: DrillOf, went_on: WentOn) -> None:
    result = await spread("kill-agent", then="kill-machine", machine="m1", at_step=6)
    went_on(result, {"own memory": 3, "backup": 1}, lost=0)


@pytest.mark.wide
async def test_a_peer_that_hangs_slows_nothing_down(spread: DrillOf) -> None:
    result = await spread("hang-peer", machine="m1", seconds=3.0, steps=40)
    assert result.problems == [] and result.ok
    assert result.resolution == "absorbed" and result.incidents == []
    assert result.losses_match is True
    assert result.pace is not None and result.lag is not None and result.lag > 1


@pytest.mark.wide
async def test_a_peer_that_dies_in_the_middle_of_a_backup(spread: DrillOf, went_on: WentOn) -> None:
    result = await spread("kill-peer", machine="m0", at_step=6)  # m0 has the backup of rank 3
    assert result.problems == []
    assert result.emptied == ["m3"]
    assert (
        result.steps_promised is not None and result.steps_promised <= 6
    )  # a rank that was late sends every second step
    went_on(result, {"own memory": 3, "backup": 1}, lost=result.steps_promised)


def on_others(result: DrillResult, evicted: list[str]) -> None:
    """Check that other machines replaced the machines that never came back."""
    assert result.problems == []
    assert (result.ok, result.fired, result.resolution, result.generations) == (True, True, "eviction", 2)
    assert (result.evicted, result.losses_match, result.leaked) == (evicted, True, [])


@pytest.mark.wide
async def test_a_machine_that_stays_away_is_replaced(drill: DrillOf) -> None:
    on_others(await drill("kill-machine", machine="m1", gone=True), ["m1"])


@pytest.mark.wide
async def test_the_machine_of_the_rendezvous_store_stays_away(drill: DrillOf) -> None:
    on_others(await drill("kill-machine", machine="m0", gone=True), ["m0"])


@pytest.mark.wide
async def test_all_machines_of_a_job_stay_away_and_the_disk_is_what_is_left(drill: DrillOf) -> None:
    on_others(await drill("kill-group", kind="dp", index=0, gone=True), ["m0", "m1"])


@pytest.mark.wide
async def test_a_machine_that_stays_away_where_there_is_no_other_parks_the_job(spread: DrillOf) -> None:
    result = await spread("kill-machine", machine="m2", gone=True)
    assert result.resolution == "parked"
    assert result.evicted == []


@pytest.mark.wide
@pytest.mark.parametrize("part", ["kill-worker", "kill-temporal"])
@pytest.mark.parametrize("moment", ["begin", "end"])
async def test_the_control_plane_dies_while_a_machine_is_replaced(drill: DrillOf, part: str, moment: str) -> None:
    result = await drill(part, in_stage="evict", moment=moment, during="kill-machine", machine="m1", gone=True)
    on_others(result, ["m1"])
