"""Real jobs that end, hang or fail in ways that are easily confused."""

from __future__ import annotations

import asyncio
import textwrap
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from drills import DrillCluster
from everstep.model.job import JobSpec
from everstep.model.job_state import JobState
from everstep.model.recovery_policy import RecoveryPolicy
from everstep.model.stage import NOT_CONFIRMED

pytestmark = [pytest.mark.drill, pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(240)]

LIMIT_S = 120.0
Run = Callable[..., Awaitable[JobState]]

BEGIN = """
import os, sys, time
generation = int(os.environ["TORCHELASTIC_RESTART_COUNT"]) + 1
rank = int(os.environ["RANK"])
"""
BREAKS = """
import everstep
run = everstep.join()
for step in run.steps(1000):
    run.report(step, loss=1.0)
    time.sleep(0.05)
    if step == 10:
        break
if rank == 0:
    time.sleep(3)  # writes the model, while the others are gone
"""
WITHOUT_LOOP = """
import everstep
run = everstep.join()
for step in range(2000):
    run.report(step, loss=1.0)
    time.sleep(0.05)
    if step > 20 and os.path.exists(shown):
        break
"""
LEAVES = """
import everstep
run = everstep.join()
for step in run.steps(100 if generation == 1 else 10):
    run.report(step, loss=1.0)
    time.sleep(0.1)
    if generation == 1 and rank == 1 and step == 3:
        os._exit(0)
"""
SLOW_FIRST_STEP = """
import everstep
run = everstep.join()
for step in run.steps(40, run.checkpoint()):
    time.sleep(6 if run.resumed_from in (None, step) and step in (0, run.resumed_from) else 0.05)
    run.report(step, loss=1.0)
    if generation == 1 and rank == 1 and step == 20:
        raise ValueError("once")
"""
HANGS = """
import everstep
run = everstep.join()
if generation == 1:
    time.sleep(3600)  # a rendezvous that never comes about
for step in run.steps(10):
    run.report(step, loss=1.0)
"""
SLOW_IMPORT = """
time.sleep(2 if rank == 1 else 3600)
raise ValueError("bad data")
"""
FAILS_AFTER_STEPS = """
import torch
if generation > 1:
    time.sleep(2 if rank == 1 else 3600)
    raise ImportError("gone since")
weight = torch.zeros(1, requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.1)
for step in range(50):
    weight.sum().backward()
    optimizer.step()
    time.sleep(0.05)
    if rank == 1 and step == 40:
        raise RuntimeError("a first fault")
"""


@pytest.fixture
def run(cluster: DrillCluster, tmp_path: Path) -> Run:
    """Runs a script as a job of two ranks until the job ends or is parked. A parked job is abandoned.

    The job creates the file ``shown`` once it has recorded how the script shows its steps. The script can wait for it.
    """

    async def until_over(script: str, **policy: dict[str, Any]) -> JobState:
        path = tmp_path / "train.py"
        shown = tmp_path / "shown"
        path.write_text(textwrap.dedent(BEGIN) + f"shown = {str(shown)!r}\n" + script)
        policy["retry"] = {"backoff_initial_s": 0.1, "backoff_max_s": 0.1} | policy.get("retry", {})
        name = cluster.next_name("ending")
        spec = JobSpec(name=name, script=str(path), machines=2, policy=RecoveryPolicy.model_validate(policy))
        await cluster.control.start_job(spec, cluster.machines[:2])
        async with asyncio.timeout(LIMIT_S):
            while not (state := await cluster.control.state(name)).outcome and state.status != "parked":
                if state.showing.kind:
                    shown.touch()
                await asyncio.sleep(0.2)
            if state.status == "parked":
                await cluster.control.answer(state.incidents[-1].id, "abandon", "the test is over")
            await cluster.control.result(name)
        # The status was read before the job was abandoned. All other facts are read after that.
        return (await cluster.control.state(name)).model_copy(update={"status": state.status})

    return until_over


async def test_breaking_out_of_the_loop_is_a_normal_end(run: Run) -> None:
    state = await run(BREAKS, stop={"exit_grace_s": 0.5}, hang={"floor_s": 1.0})

    assert (state.outcome, len(state.lineage)) == ("finished after 0 incidents", 1)


async def test_reports_without_a_loop_are_steps_and_the_job_can_finish(run: Run) -> None:
    state = await run(WITHOUT_LOOP, confirm={"start_timeout_s": 20.0, "timeout_s": 20.0})

    assert (state.outcome, len(state.lineage), state.unconfirmed) == ("finished after 0 incidents", 1, "")
    assert state.showing.kind == "calls"


async def test_a_rank_that_leaves_while_the_others_train_is_an_incident(run: Run) -> None:
    state = await run(LEAVES, stop={"exit_grace_s": 1.0})

    assert state.outcome == "finished after 1 incident"
    assert "rank 1 on m1 left with code 0 before the job was over" in state.incidents[0].headline
    assert state.failures[0].cause == "early exit"


@pytest.mark.wide
async def test_a_long_first_step_is_awaited_in_every_generation(run: Run) -> None:
    state = await run(SLOW_FIRST_STEP, hang={"floor_s": 2.0})

    assert state.outcome == "finished after 1 incident"
    assert len(state.lineage) == 2
    assert state.incidents[0].headline.startswith("Recovered in ")
    assert state.first_step_s > 6


async def test_a_hang_before_any_step_is_noticed(run: Run) -> None:
    state = await run(HANGS, confirm={"start_timeout_s": 3.0, "timeout_s": 3.0, "alive_s": 0.5})

    assert state.outcome == "finished after 1 incident"
    assert len(state.lineage) == 2
    assert state.failures[0].cause == "hang"


@pytest.mark.wide
async def test_a_slow_import_that_fails_each_time_never_recovers(run: Run) -> None:
    state = await run(SLOW_IMPORT, confirm={"alive_s": 0.5})

    assert state.status == "parked"
    assert len(state.lineage) == 3
    assert [one.resolution for one in state.incidents[:-1]] == [NOT_CONFIRMED] * 2
    assert not any("Recovered" in one.headline for one in state.incidents)


@pytest.mark.wide
async def test_a_script_that_showed_steps_is_confirmed_only_by_steps(run: Run) -> None:
    state = await run(FAILS_AFTER_STEPS, confirm={"alive_s": 0.5}, retry={"max_attempts": 10})

    # The job trained before, so the third or the fourth ImportError parks it.
    assert (state.status, len(state.lineage) in {4, 5}) == ("parked", True)
    assert [one.resolution for one in state.incidents] == ["abandoned"], (
        "there was one incident, and it ended only because it was abandoned"
    )
