"""What an agent shows of ranks that report, and of ranks that do not."""

from __future__ import annotations

import pytest

from agent.v1 import agent_pb2 as pb
from tests.agent.agents import RunningAgent, prepared

pytestmark = pytest.mark.asyncio(loop_scope="module")

REPORT = """
import os, sys, time
from pathlib import Path
from everstep.rank.step_reports import ReportFile
report = ReportFile.open(Path(os.environ["EVERSTEP_REPORT_FILE"]))
report.attach()
for step in range(int(sys.argv[1])):
    report.report(step, 1.0 / (step + 1), 0.5, 100)
    report.complete(step + 1)
"""


async def test_progress_and_steps_of_a_script_that_reports(agent: RunningAgent) -> None:
    job = await prepared(agent, REPORT, ranks=2, args=("2500",))
    await job.launch()
    await job.exits(2)
    # Tokens are counted only up to the records that were drained. The thread that drains them may be behind.
    reply = await job.progress(
        lambda p: all((rank.completed_steps, rank.tokens > 0) == (2500, True) for rank in p.ranks)
    )
    rank = reply.ranks[1]
    assert (rank.attached, rank.alive, rank.tokens) == (True, False, 250_000)
    assert rank.loss == pytest.approx(1 / 2500)
    assert 0 < rank.milestones.forked <= rank.milestones.script_entered <= rank.milestones.joined
    replies = [r async for r in agent.client.steps(pb.StepsRequest(job=job.name, rank=-1, from_step=100))]
    steps = {rank: [s.step for r in replies if r.rank == rank for s in r.records] for rank in (0, 1)}
    assert steps == {0: list(range(100, 2500)), 1: list(range(100, 2500))}
    await job.stop()
    await job.launch(2)
    await job.observe(4, "rank_ended")
    replies = [r async for r in agent.client.steps(pb.StepsRequest(job=job.name, rank=0, from_step=0))]
    assert [(s.generation, s.step) for r in replies for s in r.records] == [(g, s) for g in (1, 2) for s in range(2500)]
    await job.release()


async def test_a_script_that_knows_nothing_of_everstep_shows_progress(agent: RunningAgent) -> None:
    script = """
import torch
parameter = torch.nn.Parameter(torch.zeros(3))
optimizer = torch.optim.AdamW([parameter])
for _ in range(7):
    parameter.grad = torch.ones(3)
    optimizer.step()
"""
    job = await prepared(agent, script, ranks=1)
    await job.launch()
    await job.exits(1)
    rank = (await job.progress(lambda p: p.ranks[0].optimizer_steps == 7)).ranks[0]
    assert (rank.completed_steps, rank.attached) == (-1, False)
    assert rank.milestones.first_step
    await job.release()


@pytest.mark.parametrize(
    ("leave", "left"), [("break", True), ("raise ValueError(step)", False), ("sys.exit(3)", False)]
)
async def test_breaking_out_of_the_loop_is_told_from_an_error(agent: RunningAgent, leave: str, left: bool) -> None:
    script = f"""
import sys
import everstep
run = everstep.join()
for step in run.steps(9):
    if step == 2:
        {leave}
"""
    job = await prepared(agent, script, ranks=1)
    await job.launch()
    await job.exits(1)

    rank = (await job.progress(lambda p: not p.ranks[0].alive)).ranks[0]

    assert rank.completed_steps == 2 and not rank.finished
    assert bool(rank.milestones.loop_left) == left
    await job.release()


async def test_reports_are_counted(agent: RunningAgent) -> None:
    script = """
import everstep
run = everstep.join()
for step in range(5):
    run.report(step, loss=1.0)
"""
    job = await prepared(agent, script, ranks=1)
    await job.launch()
    (end,) = await job.exits(1)

    told = await job.progress(lambda p: not p.ranks[0].alive)
    assert told.ranks[0].reports == 5
    assert told.ranks[0].milestones.first_step <= told.ranks[0].stepped_ns <= end.time_ns <= told.time_ns
    stopped = await agent.client.stop(pb.StopRequest(job=job.name, generation=1))
    assert stopped.ranks[0].shown_steps == 5
    await job.release()
