"""Storage that hangs, with a real agent. Each such location is reported at once, and delays no command.

The manifest is a FIFO without a writer. Opening it hangs, like opening a file on a share whose server is away.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from agent.v1 import agent_pb2 as pb
from tests.agent.agents import Job, RunningAgent, until
from tests.agent.checkpoints.tiers.test_agent import SAVING

pytestmark = pytest.mark.asyncio(loop_scope="module")

DISK, REMOTE = pb.HeldCheckpoint.DISK, pb.HeldCheckpoint.REMOTE


@pytest_asyncio.fixture(loop_scope="module")
async def job(agent: RunningAgent) -> AsyncIterator[Job]:
    found = Job(agent, SAVING, ranks=2)
    await found.prepare()
    yield found
    await found.release()


def hang(root: Path, job: Job, step: int = 5) -> Path:
    """Make every look at the job's folder hang. Returns the path for ``let_go``."""
    folder = root / job.name / f"step-{step:09d}"
    folder.mkdir(parents=True)
    os.mkfifo(folder / "rank-0.json")
    return folder / "rank-0.json"


def let_go(fifo: Path) -> None:
    """Let the storage answer again. It has no such step then."""
    descriptor = os.open(fifo, os.O_RDWR | os.O_NONBLOCK)  # a process that waits for a writer continues …
    fifo.unlink()
    fifo.parent.rmdir()
    os.close(descriptor)  # … and reads an empty file


async def launch(job: Job, disk_path: Path, generation: int = 1) -> None:
    request = job.launch_request(generation)
    request.checkpoint.CopyFrom(pb.CheckpointOptions(slots=3, disk=True, disk_path=str(disk_path), disk_keep=2))
    request.program.env["EVERSTEP_TOPOLOGY"] = "1,2,1,1,pp-dp-tp"
    await job.agent.client.launch(request, timeout_s=60)


async def saved(job: Job) -> None:
    await job.progress(lambda reply: len(reply.ranks) == 2 and all(one.saved.own_step > 2 for one in reply.ranks))


def unlisted(held: list[pb.HeldCheckpoint]) -> dict[int, str]:
    return {one.tier: one.reason for one in held if not one.valid and one.completed_steps < 0 and one.reason != "empty"}


async def test_a_disk_that_hangs_is_unknown_to_a_stop_and_memory_is_told(job: Job, tmp_path: Path) -> None:
    await launch(job, tmp_path)
    await saved(job)
    await job.agent.client.persist(pb.PersistRequest(job=job.name, generation=1, step=7))
    fifo = hang(tmp_path, job)
    try:
        reply = await job.stop()
    finally:
        let_go(fifo)

    held = list(reply.checkpoints)
    assert f"{tmp_path} cannot be listed: no answer for" in unlisted(held)[DISK]
    assert {one.rank for one in held if one.valid and one.tier == pb.HeldCheckpoint.OWN} == {0, 1}
    assert reply.disk_asked == 7

    after = await job.agent.client.checkpoints(pb.CheckpointsRequest(job=job.name, disk_path=str(tmp_path)))
    assert DISK not in unlisted(list(after.checkpoints)), "the disk answers again, so it is listed"


async def test_what_hangs_hides_no_other_place_and_holds_up_no_command(job: Job, tmp_path: Path) -> None:
    disk, remote = tmp_path / "disk", tmp_path / "remote"
    disk.mkdir()
    remote.mkdir()
    request = pb.CheckpointsRequest(job=job.name, disk_path=str(disk), remote_url=f"file://{remote}", patience_s=0.2)
    fifo = hang(remote, job)
    try:
        for _ in range(40):  # this is more than the number of threads of the event loop
            told = unlisted(list((await job.agent.client.checkpoints(request)).checkpoints))
            assert told.keys() == {REMOTE}
        await launch(job, disk)
        await saved(job)
        assert {one.rank for one in (await job.stop()).checkpoints if one.valid} == {0, 1}
    finally:
        let_go(fifo)


async def test_a_disk_path_that_is_not_there_is_unknown_to_a_stop(job: Job, tmp_path: Path) -> None:
    gone = tmp_path / "disk"
    gone.mkdir()
    await launch(job, gone)
    await saved(job)
    mark = gone / job.name / "machines" / "m1"
    await until(mark.exists, "the agent's thread for the disk has written its mark")
    mark.unlink()
    (gone / job.name / "machines").rmdir()
    (gone / job.name).rmdir()
    gone.rmdir()

    reply = await job.stop()

    assert "cannot be listed: No such file" in unlisted(list(reply.checkpoints))[DISK]


async def test_an_agent_that_was_restarted_cannot_say_what_was_asked_for(job: Job, tmp_path: Path) -> None:
    await launch(job, tmp_path)
    await saved(job)
    job.agent.kill()
    await job.agent.start()

    reply = await job.stop()

    assert not reply.HasField("disk_asked")
