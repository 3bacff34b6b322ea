"""Ranks wait at the end of the same step, with its state saved, and continue when they may."""

from __future__ import annotations

import asyncio

import pytest

from agent.v1 import agent_pb2 as pb
from everstep.errors import UnknownJob
from tests.agent.agents import Job, RunningAgent, prepared

pytestmark = pytest.mark.asyncio(loop_scope="module")

TRAIN = """
import time, torch, torch.distributed as dist
import everstep
run = everstep.join()
dist.init_process_group("gloo")
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
state = run.checkpoint(model=model, optimizer=optimizer)
for step in run.steps(100_000, state):
    loss = model(torch.ones(1, 4)).sum()
    optimizer.zero_grad()
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    run.report(step, loss=loss.detach(), tokens=1)
    time.sleep(0.01)
"""
ALONE_STEPS = "import time\nimport torch\nwhile True:\n    time.sleep(0.05)\n"


async def launch(
    job: Job, generation: int = 1, resume_step: int = 0, *, overlap: bool = True, version: int = 0
) -> None:
    """Launch a job with two ranks on one machine, which train together."""
    client = job.agent.client
    store = await client.start_store(pb.StartStoreRequest(job=job.name, generation=generation))
    request = job.launch_request(generation)
    request.resume_step, request.version = resume_step, version
    request.checkpoint.disk, request.checkpoint.disk_keep = True, 10
    request.checkpoint.slots, request.checkpoint.overlap = 3, overlap
    request.program.env.update(
        {
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": store.host,
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "EVERSTEP_TOPOLOGY": "1,2,1,1,pp-dp-tp",
        }
    )
    await client.launch(request, timeout_s=60)


async def steps(job: Job, at_least: int) -> list[int]:
    """Return the completed steps of both ranks, once both have completed ``at_least`` steps."""
    reply = await job.progress(lambda now: len(now.ranks) == 2 and min(_completed(now)) >= at_least)
    return _completed(reply)


def _completed(reply: pb.ProgressReply) -> list[int]:
    return [rank.completed_steps for rank in reply.ranks]


async def on_disk(job: Job, step: int) -> None:
    await job.progress(lambda now: all(rank.saved.disk_step == step for rank in now.ranks))


async def align(job: Job, step: int, generation: int = 1) -> pb.AlignRanksReply:
    return await job.agent.client.align_ranks(pb.AlignRanksRequest(job=job.name, generation=generation, step=step))


async def aligned_at(job: Job) -> int:
    """Return the step at which all ranks wait; 0: one of them does not wait."""
    return min(rank.aligned for rank in (await job.progress(lambda _: True)).ranks)


async def held(job: Job, step: int, generation: int = 1) -> pb.AlignRanksReply:
    """Repeat the request until all ranks wait; returns the answer to a last request after that."""
    for _ in range(3000):
        reply = await align(job, step, generation)
        if await aligned_at(job) >= step:
            return await align(job, step, generation)
        await asyncio.sleep(0.01)
    raise AssertionError(reply)


@pytest.mark.parametrize("overlap", [True, False])
async def test_ranks_wait_after_the_same_step_with_its_state_saved_and_nothing_is_lost(
    agent: RunningAgent, overlap: bool
) -> None:
    job = await prepared(agent, TRAIN)
    await launch(job, overlap=overlap, version=4)
    await steps(job, 3)
    now = await align(job, 0)
    assert now.known
    assert now.farthest >= 3

    step = now.farthest + 20
    reply = await held(job, step)
    assert reply.farthest == step
    assert await steps(job, step) == [step, step]
    stopped = await job.stop()
    assert [(rank.completed_steps, rank.stopped_by_us) for rank in stopped.ranks] == [(step, True)] * 2
    own = [copy for copy in stopped.checkpoints if copy.tier == pb.HeldCheckpoint.OWN and copy.valid]
    assert sorted(copy.rank for copy in own if copy.completed_steps == step) == [0, 1]

    await launch(job, 2, step, overlap=overlap, version=5)
    await steps(job, step + 5)
    await job.stop(2)
    found = [
        (record.step, record.version)
        async for reply in agent.client.steps(pb.StepsRequest(job=job.name, rank=0))
        for record in reply.records
    ]
    assert found == [(at, 4 if at < step else 5) for at in range(len(found))], (
        "each step is recorded once, with the version that ran it"
    )
    await job.release()


async def test_checkpoints_on_disk_name_the_version_that_saved_them_also_after_a_restart_of_the_agent(
    agent: RunningAgent,
) -> None:
    job = await prepared(agent, TRAIN)
    await launch(job, version=4)
    for generation, version in (1, 4), (2, 5):
        if generation == 2:
            agent.kill()
            await agent.start()
            await job.stop()
            await launch(job, 2, version=version)
        waiting = max(await steps(job, 1)) + 20
        await held(job, waiting, generation)
        wanted = waiting + 5  # no rank passes this step before the request has come
        await agent.client.persist(pb.PersistRequest(job=job.name, generation=generation, step=wanted))
        await held(job, wanted, generation)  # so that the slot is not overwritten while the disk is slow
        await on_disk(job, wanted)
        copies = (await agent.client.checkpoints(pb.CheckpointsRequest(job=job.name))).checkpoints
        found = {(c.rank, c.version) for c in copies if c.tier == c.DISK and c.completed_steps == wanted}
        assert found == {(0, version), (1, version)}
    await job.release()


async def test_ranks_that_are_let_go_on(agent: RunningAgent) -> None:
    job = await prepared(agent, TRAIN)
    await launch(job)
    await steps(job, 1)
    step = (await align(job, 0)).farthest + 20
    await held(job, step)
    await align(job, 0)
    await job.progress(lambda now: not any(rank.aligned for rank in now.ranks))

    assert min(await steps(job, step + 10)) >= step + 10
    assert b"was not stopped and continues" in await job.log(0, 2)
    again = max(await steps(job, 0)) + 20
    await held(job, again)
    assert await steps(job, again) == [again, again]
    await job.release()


async def test_scripts_that_do_not_number_their_steps_are_not_held(agent: RunningAgent) -> None:
    job = await prepared(agent, ALONE_STEPS)
    assert await align(job, 5) == pb.AlignRanksReply(farthest=-1), "no rank runs, so no rank can be aligned"
    await job.launch()
    await job.entered()

    assert await align(job, 5) == pb.AlignRanksReply(farthest=-1)
    assert await align(job, 5, generation=2) == pb.AlignRanksReply(farthest=-1)
    with pytest.raises(UnknownJob):
        await agent.client.align_ranks(pb.AlignRanksRequest(job="no-such-job", generation=1, step=1))
    await job.release()


async def move(job: Job, before: pb.SavePace, after: pb.SavePace, generation: int = 1) -> pb.ProgressReply:
    """Move both ranks to a pace, as a watcher does, and wait until they have moved."""
    for pace, following in ((before, after), (after, after)):
        request = pb.PaceSavesRequest(job=job.name, generation=generation, pace=pace, following=following)
        await job.agent.client.pace_saves(request)
    return await job.progress(lambda now: all(rank.saves.pace == after for rank in now.ranks))


async def test_ranks_that_save_every_16th_step_wait_with_any_step_saved_and_keep_their_pace(
    agent: RunningAgent,
) -> None:
    job = await prepared(agent, TRAIN)
    await launch(job)
    await steps(job, 1)
    pace = pb.SavePace(every=1)
    for number, every in enumerate((1, 2, 4, 8, 16), 1):
        before, pace = pace, pb.SavePace(number=number, every=every, waits=True)
        reply = await move(job, before, pace)
    assert all(rank.saves.save_s > 0 and rank.saves.step_s > 0 for rank in reply.ranks)
    late = pb.PaceSavesRequest(
        job=job.name, generation=1, pace=pb.SavePace(every=1), following=pb.SavePace(number=1, every=2)
    )
    await agent.client.pace_saves(late)
    agent.kill()
    await agent.start()
    reply = await job.progress(lambda now: len(now.ranks) == 2)
    assert all(rank.saves.asked == pace for rank in reply.ranks), "a late message and a restart change nothing"

    step = (await align(job, 0)).farthest + 20
    step += step % 16 == 0
    await held(job, step)
    await align(job, 0)
    reply = await job.progress(lambda now: min(_completed(now)) > step + 16)
    assert all(step not in rank.saved.own_steps for rank in reply.ranks), "other ranks may not have it"

    step = max(_completed(reply)) + 20
    step += step % 16 == 0
    await held(job, step)
    stopped = await job.stop()
    own = [copy for copy in stopped.checkpoints if copy.tier == pb.HeldCheckpoint.OWN and copy.valid]
    assert sorted(copy.rank for copy in own if copy.completed_steps == step) == [0, 1]
    assert stopped.save_every == 16
    await job.release()
