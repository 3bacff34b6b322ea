"""An agent whose state folder is full or hangs still stops and starts ranks, and reports the problem."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.state.disk import StateDisk
from agent.v1 import agent_pb2 as pb
from controlplane.local import mounts
from everstep.errors import AgentError, Fenced
from tests.agent.agents import Job, RunningAgent, alive, running_agent, until

SLEEP = "import time; time.sleep(600)"
TALKS = "import os, time\nfor _ in range(100_000):\n    print('x' * 1000, flush=True)\n    time.sleep(0.05)\n"
START_S = 120.0
"""The limit for the start of a fork server, which imports torch, on a busy computer."""
ANSWER_S = 60.0
"""The limit for a command's answer. A command that waits for the disk would never be answered."""


@contextlib.contextmanager
def full(folder: Path) -> Iterator[None]:
    """Fill the file system of a folder until no byte is left."""
    filler = folder / "filler"
    try:
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))
        yield
    finally:
        filler.unlink()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder whose subfolder ``state``, for an agent, is a separate small file system."""
    if said := mounts.why_not(tmp_path):
        pytest.skip(said)
    with mounts.small(tmp_path / "state", 4 << 20):
        (tmp_path / "state").chmod(0o700)
        yield tmp_path


@pytest.fixture
def disk_that_freezes(tmp_path: Path) -> Iterator[Path]:
    """A folder whose subfolder ``state``, for an agent, is a file system on which fsfreeze makes every write hang."""
    if missing := [tool for tool in ("mkfs.ext4", "fsfreeze", "mount") if not shutil.which(tool)]:
        pytest.skip(f"{', '.join(missing)} is not there")
    image, state = tmp_path / "image", tmp_path / "state"
    with image.open("wb") as file:
        file.truncate(16 << 20)
    state.mkdir(mode=0o700)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True, capture_output=True)
    mounted = subprocess.run(
        ["mount", "-o", "loop", str(image), str(state)], check=False, capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"a loop device cannot be mounted: {mounted.stderr.strip()}")
    try:
        shutil.rmtree(state / "lost+found")
        state.chmod(0o700)
        yield tmp_path
    finally:
        subprocess.run(["umount", "-l", str(state)], check=True)


@contextlib.contextmanager
def frozen(state: Path) -> Iterator[None]:
    subprocess.run(["fsfreeze", "-f", str(state)], check=True)
    try:
        yield
    finally:
        subprocess.run(["fsfreeze", "-u", str(state)], check=True)


async def in_time(job: Job, command: str, generation: int) -> None:
    """Send a command, and check that it is answered in time and did its work."""
    async with asyncio.timeout(ANSWER_S):
        if command == "stop":
            before = [rank.pid for rank in (await job.progress(bool)).ranks]
            await job.stop(generation)
            assert not any(map(alive, before))
        else:
            launched = await job.launch(generation)
            assert all(alive(rank.pid) for rank in launched.ranks)
            await job.entered()


async def problem(job: Job, wanted: str) -> None:
    """Wait until the ranks' progress reports this problem of the disk. An empty text means no problem."""
    if wanted:
        await job.progress(lambda reply: all(wanted in one.saved.disk_problem for one in reply.ranks))
    else:
        await job.progress(lambda reply: all(not one.saved.disk_problem for one in reply.ranks))


async def on_disk(agent: RunningAgent, job: Job, generation: int, fenced: int) -> None:
    """Wait until the job's record on disk has these values."""

    def there() -> bool:
        record = json.loads((agent.state / "jobs" / job.name / "job.json").read_text())
        return (record["generation"], record["fenced"]) == (generation, fenced)

    await until(there, f"the disk has generation {generation}, fenced {fenced}")


@pytest.mark.timeout(300)
async def test_an_agent_stops_and_starts_ranks_with_a_full_disk(small_disk: Path) -> None:
    async with running_agent(small_disk) as agent:
        job = Job(agent, TALKS)
        await job.prepare()
        await in_time(job, "launch", 1)
        with full(agent.state):
            await in_time(job, "stop", 1)
            await in_time(job, "launch", 2)
            await problem(job, "No space left")
            await asyncio.sleep(0.2)
            assert all(rank.alive for rank in (await job.entered()).ranks), (
                "the ranks live, and only their output is lost"
            )
            await in_time(job, "stop", 2)

            agent.kill()
            await agent.start()
            with pytest.raises(Fenced, match="everything up to 2 is fenced"):
                await job.launch(2, request_id="late")
            await in_time(job, "launch", 3)
        await problem(job, "")
        await on_disk(agent, job, generation=3, fenced=2)
        await in_time(job, "stop", 3)


@pytest.mark.timeout(300)
async def test_an_agent_stops_and_starts_ranks_while_its_disk_hangs(disk_that_freezes: Path) -> None:
    async with running_agent(disk_that_freezes) as agent:
        job = Job(agent, SLEEP)
        await job.prepare()
        await in_time(job, "launch", 1)
        with frozen(agent.state):
            await in_time(job, "stop", 1)
            await in_time(job, "launch", 2)
            await problem(job, "the state folder cannot be written: it does not answer for")
            os.kill((await job.entered()).ranks[0].pid, 9)
            [seen] = await job.exits(1)
            assert seen.rank_ended.exit.value == 9, "the end of a rank is reported, too"
            await agent.client.acknowledge(pb.AcknowledgeRequest(up_to_sequence=seen.sequence, job=job.name))
            await in_time(job, "stop", 2)
            new = Job(agent, SLEEP)
            await agent.client.prepare(pb.PrepareRequest(job=new.name), timeout_s=START_S)
            await in_time(new, "launch", 1)
            async with asyncio.timeout(ANSWER_S):
                assert (await new.release()).bytes_freed > 0
        await on_disk(agent, job, generation=2, fenced=2)
        await in_time(job, "launch", 3)
        await problem(job, "")


async def test_a_stopped_generation_is_not_launched_after_the_agent_lost_its_memory(tmp_path: Path) -> None:
    async with running_agent(tmp_path) as agent:
        job = Job(agent, SLEEP)
        await job.prepare()
        await in_time(job, "launch", 1)
        await in_time(job, "stop", 1)
        await on_disk(agent, job, generation=1, fenced=1)
        stale = (agent.state / "jobs" / job.name / "job.json").read_bytes()
        await in_time(job, "launch", 2)
        await in_time(job, "stop", 2)
        await asyncio.sleep(0.1)
        server = (await agent.client.describe()).jobs[0].fork_server_pid
        agent.kill()  # simulate a power failure after the disk had been full since the stop of generation 1
        os.kill(server, 9)
        shutil.rmtree(agent.shm)
        (agent.state / "jobs" / job.name / "job.json").write_bytes(stale)
        (agent.state / "requests.jsonl").unlink()
        await agent.start()

        with pytest.raises(Fenced, match="lost what it knew"):
            await job.launch(2, request_id="late")

        reply = await job.stop(2, request_id="again")
        assert reply.unknown
        await in_time(job, "launch", 3)
        await job.release()


async def test_a_machine_new_to_a_job_launches_a_later_generation_only_after_a_stop(tmp_path: Path) -> None:
    async with running_agent(tmp_path) as agent:
        job = Job(agent, SLEEP)
        await job.prepare()
        with pytest.raises(AgentError, match="generation 2 was not stopped here"):
            await job.launch(3)
        await job.stop(2)
        await in_time(job, "launch", 3)
        await job.release()


async def test_the_first_launch_of_a_run_may_have_any_generation(tmp_path: Path) -> None:
    async with running_agent(tmp_path) as agent:
        job = Job(agent, SLEEP)
        await job.prepare()
        request = job.launch_request(7)
        request.begins_run = True
        store = pb.StartStoreRequest(request_id="store", job=job.name, generation=7, begins_run=True)
        await agent.client.start_store(store, timeout_s=60)
        reply = await agent.client.launch(request, timeout_s=60)
        assert reply.generation == 7 and len(reply.ranks) == job.ranks
        await job.release()


async def test_writes_stay_in_order_until_the_disk_answers(tmp_path: Path) -> None:
    disk, fifo, done = StateDisk(), tmp_path / "fifo", tmp_path / "done"
    os.mkfifo(fifo)
    disk.append(fifo, b"1 ")  # simulate a disk that hangs, since opening a FIFO waits for a reader
    disk.put(done, b"old")
    disk.append(done, b" and lines")
    assert not await disk.flush(0.05)
    assert not done.exists()
    await until(lambda: "does not answer" in disk.problem, "the hanging disk is reported")

    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(fifo.read_bytes()))
    reader.start()
    assert await disk.flush(20.0)
    reader.join()
    assert (read, done.read_bytes(), disk.problem) == ([b"1 "], b"old and lines", "")
    disk.put(done, b"new")
    disk.append(done, b"!")
    disk.close(20.0)
    assert done.read_bytes() == b"new!"


async def test_a_failed_write_is_repeated_until_it_succeeds(tmp_path: Path) -> None:
    disk, folder = StateDisk(), tmp_path / "missing"
    for line in (b"1", b"2"):
        disk.append(folder / "log", line)
    disk.put(folder / "record", b"old")
    assert await disk.flush(20.0)
    disk.put(folder / "record", b"newer")
    disk.append(folder / "log", b"3")
    assert "No such file" in disk.problem
    assert await disk.flush(20.0), "a flush does not wait for failed writes"

    folder.mkdir()
    deadline = asyncio.get_running_loop().time() + 20.0
    while not ((folder / "record").exists() and (folder / "log").exists()):
        disk.run("busy", lambda: None)  # the disk's thread always has other work
        await asyncio.sleep(0.01)
        assert asyncio.get_running_loop().time() < deadline, "both failed writes must be repeated"
    assert ((folder / "log").read_bytes(), (folder / "record").read_bytes()) == (b"123", b"newer")
    await until(lambda: disk.problem == "", "the problem is over")
    disk.close(20.0)


async def test_an_unreadable_log_delays_neither_a_stop_nor_the_report_of_an_end(tmp_path: Path) -> None:
    async with running_agent(tmp_path) as agent:
        job = Job(agent, SLEEP)
        await job.prepare()
        launched = await job.launch()
        await job.entered()
        for rank in (0, 1):
            log = agent.state / "jobs" / job.name / "logs" / f"rank-{rank}.err"
            log.unlink()
            os.mkfifo(log)  # simulate a disk that hangs, since opening a FIFO waits for a writer
        os.kill(launched.ranks[0].pid, 9)
        [seen] = await job.exits(1)
        assert (seen.rank_ended.rank, seen.rank_ended.exit.value) == (0, 9)
        assert (await agent.client.describe(timeout_s=ANSWER_S)).machine == "m1"

        async with asyncio.timeout(ANSWER_S):
            reply = await job.stop()

        assert [(one.rank, one.stopped_by_us, one.log_tail) for one in reply.ranks] == [(0, False, ""), (1, True, "")]
        assert not any(alive(rank.pid) for rank in launched.ranks)
        await job.release()
