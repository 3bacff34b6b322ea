"""Faults of ranks: after one reattempt, the result is equal bit for bit."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable

import pytest

from drills import DrillCluster, DrillResult
from drills.faults.all import drill_request
from drills.inject.plan import planned
from drills.spec.request import example
from everstep.model.job_state import JobState
from everstep.model.ladder import Rung, RungMode

pytestmark = [pytest.mark.drill, pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(300)]

Recovered = Callable[..., None]
DrillOf = Callable[..., Awaitable[DrillResult]]


@pytest.mark.wide
async def test_a_rank_in_a_mesh_with_all_axes_is_killed(drill: DrillOf, recovered: Recovered) -> None:
    result = await drill("kill-rank", machines=4, tp=2, pp=2, ranks=[5], at_step=12, steps=30)
    recovered(result)
    assert result.steps == 30
    assert [name for name, _ in result.stages] == ["stop", "decide", "reattempt", "confirm"]


@pytest.mark.wide
async def test_the_first_rank_segfaults_at_the_first_step(drill: DrillOf, recovered: Recovered) -> None:
    recovered(await drill("kill-rank", ranks=[0], at_step=0, signal="SEGV"))


@pytest.mark.wide
async def test_a_rank_is_killed_at_the_last_step(drill: DrillOf, recovered: Recovered) -> None:
    recovered(await drill("kill-rank", ranks=[3], at_step=23))


@pytest.mark.wide
async def test_two_ranks_at_once_are_one_incident(drill: DrillOf, recovered: Recovered) -> None:
    recovered(await drill("kill-rank", ranks=[1, 2]))


async def test_a_kill_during_a_save_costs_only_that_step(drill: DrillOf, recovered: Recovered) -> None:
    recovered(await drill("kill-during-save", ranks=[2]))


@pytest.mark.wide
async def test_a_kill_between_two_steps_of_the_optimizer(drill: DrillOf, recovered: Recovered) -> None:
    """An optimizer step takes four bodies. The gradients of the first two bodies are restored from the checkpoint."""
    script = [str(example("ddp.py")), "--steps", "24", "--accumulate", "4", "--dim", "16"]
    result = await drill("kill-rank", ranks=[2], tp=1, at_step=10, script=script, steps=None)
    recovered(result)


async def test_an_exception_in_user_code(drill: DrillOf, recovered: Recovered, cluster: DrillCluster) -> None:
    result = await drill("raise", ranks=[1], exception="ValueError")
    recovered(result)
    state = await cluster.control.state(result.job)
    assert state.failures[0].cause == "ValueError"


@pytest.mark.wide
@pytest.mark.parametrize("code", [0, 3])
async def test_a_rank_leaves_early(drill: DrillOf, recovered: Recovered, code: int) -> None:
    recovered(await drill("exit-rank", ranks=[1], code=code))


async def test_after_a_nan_loss_the_job_resumes_from_before_the_nan(drill: DrillOf) -> None:
    result = await drill("nan", ranks=[2], at_step=12, step_seconds=0.1)
    assert result.problems == []
    assert result.ok and result.resolution == "reattempt" and result.losses_match and result.state_match
    assert len(result.incidents) == 1 and result.leaked == []


async def test_a_machine_that_computes_a_wrong_bit_is_evicted(drill: DrillOf) -> None:
    """Bitwise alignment finds the machine. The loss is a mean over ranks, so it cannot show which machine is wrong."""
    result = await drill("bitflip", machines=3, ranks_per_machine=1, tp=1, pp=1, machine="m1", at_step=12, steps=40)
    assert result.problems == []
    assert result.ok and result.resolution == "eviction" and result.evicted == ["m1"]
    assert result.losses_match and result.state_match and len(result.incidents) == 1 and result.leaked == []
    assert "diagnose" in [name for name, _ in result.stages]


async def test_a_script_without_the_library(drill: DrillOf, recovered: Recovered, cluster: DrillCluster) -> None:
    script = [str(example("ddp_plain.py")), "--out", "{run}", "--steps", "40", "--every", "5"]
    script += ["--step-seconds", "0.05"]
    result = await drill("kill-rank", ranks=[1], tp=1, at_step=12, script=script)
    recovered(result, lost=None)
    assert result.steps_lost is None
    lines = (cluster.home / "drills" / result.job / "losses.jsonl").read_text().splitlines()
    losses: dict[int, set[float]] = {}
    for one in map(json.loads, lines):
        losses.setdefault(one["step"], set()).add(one["loss"])
    assert sorted(losses) == list(range(40))
    assert len(lines) > 40  # the script resumed from its own checkpoint and repeated some steps


@pytest.mark.wide
async def test_repeated_failures_at_one_step_park_the_job(drill: DrillOf) -> None:
    result = await drill("kill-rank", ranks=[1], times=3)
    assert result.problems == []
    assert result.ok and result.resolution == "parked"
    assert len(result.incidents) == 1
    assert result.generations == 3
    assert result.leaked == [] and result.duplicates == 0


async def test_an_operator_can_resume_a_parked_job(cluster: DrillCluster) -> None:
    request = drill_request(
        fault="kill-rank", ranks=[1], times=3, machines=2, ranks_per_machine=2, tp=2, pp=1, at_step=4, steps=12
    )
    name = cluster.next_name("resumed")
    plan = cluster.home / "drills" / name / "faults.json"
    spec = request.spec(name, {"EVERSTEP_FAULTS": str(plan)})
    untested = {"ladder.modes": {Rung.DIAGNOSE: RungMode.OFF}}  # another test covers the rung DIAGNOSE
    spec = spec.model_copy(update={"policy": spec.policy.changed(untested)})
    given = planned(request, spec, plan, cluster)
    given.write()
    await cluster.control.start_job(spec, cluster.machines[:2])

    async def parked() -> JobState:
        while (state := await cluster.control.state(name)).status != "parked":  # noqa: ASYNC110 - asked over the network
            await asyncio.sleep(0.2)
        return state

    async with asyncio.timeout(120):
        state = await parked()
        assert all(given.fired().values())
        await cluster.control.answer(state.incidents[-1].id, "resume", "the cause is gone")
        ended = await cluster.control.result(name)
    assert ended.outcome == "finished"
    state = await cluster.control.state(name)
    assert [one.resolution for one in state.incidents] == ["resumed by operator"]


async def test_a_job_continues_after_its_client_was_killed(cluster: DrillCluster) -> None:
    name = cluster.next_name("orphaned")
    command = [sys.executable, "-P", "-m", "console.main", "run", "--cluster", cluster.name, "--no-up"]
    command += ["--name", name, "--machines", "2", "--ranks-per-machine", "1", "--json"]
    client = await asyncio.create_subprocess_exec(
        *command, "--", str(example("gpt.py")), "--steps", "30", "--step-seconds", "0.1", stdout=asyncio.subprocess.PIPE
    )
    assert client.stdout is not None
    async with asyncio.timeout(120):
        async with cluster.control.feed(name, cluster.machines[:2]) as feed:
            async for picture in feed.pictures():
                if (picture.step or 0) >= 3:
                    break
        os.kill(client.pid, signal.SIGKILL)
        assert await client.wait() == -signal.SIGKILL
        ended = await cluster.control.result(name)
    assert ended.outcome == "finished"
    assert ended.incidents == []
