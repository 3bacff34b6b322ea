"""The disk and remote tiers in a real agent with real ranks. Their copies outlive the agent, its memory and the job."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from agent.v1 import agent_pb2 as pb
from tests.agent.agents import Job, RunningAgent, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

SAVING = """
import os, time
from pathlib import Path
from everstep.slots.file import SlotFile
from everstep.slots.owner import SlotOwner
from everstep.slots.tensor_table import TensorSpec, pack_table
generation, resume = int(os.environ["EVERSTEP_GENERATION"]), max(int(os.environ["EVERSTEP_RESUME_STEP"]), 0)
owner = SlotOwner(os.environ["EVERSTEP_JOB"], os.environ["EVERSTEP_RUN"], int(os.environ["RANK"]))
file = SlotFile(Path(os.environ["EVERSTEP_CHECKPOINT_FILE"]), slots=3, owner=owner, generation=generation)
file.discard_after(resume or -1)

def at(rank):
    return Path(f"{__file__}.{generation}.{rank}")

def reached(rank, step):
    try:
        return int(at(rank).read_text() or 0) >= step
    except FileNotFoundError:
        return False

for step in range(resume + 1, 100_000):
    at(os.environ["RANK"]).write_text(str(step))
    while Path(f"{__file__}.hold").exists() or not all(reached(rank, step) for rank in range(2)):  # as a collective
        time.sleep(0.001)
    file.begin(pack_table([TensorSpec("model.w", "uint8", (20_000,), 0, 20_000, "cpu")]) + b"tree", 20_000)
    with file.tensors() as view:
        view[:] = bytes([step % 251]) * 20_000
    file.commit(step)
    with open(os.environ["EVERSTEP_SAVE_SIGNAL"], "wb", buffering=0) as signal:
        signal.write(b".")
    time.sleep(0.02)
"""

LEAD = 100
"""A number of steps that takes two seconds. The wanted step must still be ahead when the agent gets the request."""


@pytest_asyncio.fixture(loop_scope="module")
async def job(agent: RunningAgent) -> AsyncIterator[Job]:
    found = Job(agent, SAVING, ranks=2)
    await found.prepare()
    yield found
    await found.release()


def options(**more: object) -> pb.CheckpointOptions:
    return pb.CheckpointOptions(
        **{"slots": 3, "disk": True, "disk_every_steps": 10, "disk_keep": 2, **more}  # type: ignore[arg-type]
    )


async def launch(job: Job, generation: int = 1, resume_step: int = 0) -> None:
    request = job.launch_request(generation)
    request.checkpoint.CopyFrom(options())
    request.resume_step = resume_step
    request.program.env["EVERSTEP_TOPOLOGY"] = "1,2,1,1,pp-dp-tp"
    await job.agent.client.launch(request, timeout_s=60)


async def on_disk(job: Job, *, verify: bool = False) -> dict[int, list[int]]:
    """Return rank → valid steps on disk."""
    reply = await job.agent.client.checkpoints(pb.CheckpointsRequest(job=job.name, verify=verify))
    return steps_of(list(reply.checkpoints))


def steps_of(held: list[pb.HeldCheckpoint]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {0: [], 1: []}
    for one in held:
        if one.tier == pb.HeldCheckpoint.DISK and one.valid:
            found[one.rank].append(one.completed_steps)
    return found


async def common_beyond(job: Job, step: int) -> int:
    """Wait for a later step that both ranks have on disk. Returns the step."""

    def beyond(reply: pb.ProgressReply) -> bool:
        return len(reply.ranks) == job.ranks and all(rank.saved.disk_step > step for rank in reply.ranks)

    reply = await job.progress(beyond)
    return int(min(rank.saved.disk_step for rank in reply.ranks))


async def test_steps_on_disk_survive_the_agent_the_memory_and_the_job(agent: RunningAgent, job: Job) -> None:
    await launch(job)
    first = await common_beyond(job, 0)
    assert first % 10 == 0
    agent.kill()
    await agent.start()
    later = await common_beyond(job, first)

    await agent.client.persist(pb.PersistRequest(job=job.name, generation=1, step=later + LEAD))
    reply = await job.progress(
        lambda reply: all(rank.saved.disk_step >= later + LEAD and rank.saved.disk_wanted == -1 for rank in reply.ranks)
    )
    assert not any(rank.saved.disk_problem for rank in reply.ranks)

    stopped = steps_of(list((await job.stop()).checkpoints))
    whole = max(set(stopped[0]) & set(stopped[1]))
    assert whole >= later + LEAD
    assert await on_disk(job, verify=True) == stopped

    for path in (agent.shm / job.name).glob("checkpoint-*"):
        path.unlink()
    shards = [pb.ShardSource(rank=rank, completed_steps=whole, tier=pb.HeldCheckpoint.DISK) for rank in (0, 1)]
    request = pb.RestoreRequest(request_id="restore", job=job.name, shards=shards, checkpoint=options())
    restored = await agent.client.restore(request, timeout_s=60)
    assert [(shard.rank, shard.ok, shard.bytes > 20_000) for shard in restored.shards] == [
        (0, True, True),
        (1, True, True),
    ]

    await launch(job, generation=2, resume_step=whole)
    assert await common_beyond(job, whole) > whole
    await job.stop(2)
    await job.release()
    left = await on_disk(job)
    assert max(set(left[0]) & set(left[1])) > whole


async def test_later_steps_are_set_aside_when_a_job_goes_back(agent: RunningAgent, job: Job) -> None:
    await launch(job)
    step = await common_beyond(job, 0)
    await common_beyond(job, step)
    await job.stop()
    job.path.with_name(f"{job.path.name}.hold").touch()  # the new generation saves nothing
    await launch(job, generation=2, resume_step=5)
    await job.stop(2)
    assert all(later <= 5 for later in (await on_disk(job))[0])
    folder = agent.state / "checkpoints" / job.name
    await until(lambda: any(folder.glob("abandoned-g2-step-*")), "the later steps are kept under another name")
