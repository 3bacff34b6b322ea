"""An agent and a fork server are killed. No rank is lost, doubled or forgotten."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import pytest_asyncio

from agent.v1 import agent_pb2 as pb
from everstep.errors import AgentUnreachable
from everstep.system.procfs import start_ticks
from tests.agent.agents import Job, RunningAgent, alive, running_agent, until
from tests.agent.counted import COUNTED, entries, first_pid, fork_server, let_end

pytestmark = pytest.mark.asyncio(loop_scope="module")
REPORTING = """
import os, time
from pathlib import Path
from everstep.rank.step_reports import ReportFile
report = ReportFile.open(Path(os.environ["EVERSTEP_REPORT_FILE"]))
report.attach()
for step in range(100_000):
    report.report(step, 1.0, 0.5, 1)
    report.complete(step + 1)
    time.sleep(0.005)  # the file holds 4096: the agent has 20 s to be back
"""


@pytest_asyncio.fixture(loop_scope="module")
async def job(agent: RunningAgent) -> AsyncIterator[Job]:
    found = Job(agent, COUNTED, ranks=3)
    await found.prepare()
    yield found
    await found.release()


async def test_a_new_agent_adopts_what_runs(agent: RunningAgent, job: Job) -> None:
    launched = await job.launch()
    await job.entered()
    agent.kill()
    await agent.start()
    started = (await job.observe(2, "agent_started"))[-1]
    assert started.agent_started.adopted_ranks == 3
    assert (await agent.client.describe()).jobs[0].generation == 1
    assert await job.launch() == launched, "the first reply is remembered"
    assert all(alive(rank.pid) for rank in launched.ranks)
    let_end(job, 1)
    exited = (await job.exits(1))[0].rank_ended
    assert (exited.rank, exited.exit.kind, exited.exit.value) == (1, pb.Exit.CODE, 5)
    stopped = await job.stop()
    assert [rank.stopped_by_us for rank in stopped.ranks] == [True, False, True]
    assert not any(alive(rank.pid) for rank in launched.ranks)


async def test_an_end_that_no_agent_saw_is_told_once(agent: RunningAgent, job: Job) -> None:
    await job.launch()
    await job.entered()
    agent.kill()
    let_end(job, 2)
    await until(lambda: not alive(entries(job)[2][0]), "rank 2 ended")
    for _ in range(2):
        await agent.start()
        seen = await job.exits(1)
        agent.kill()
    await agent.start()
    assert [o.rank_ended.rank for o in seen] == [2]
    let_end(job, 0)
    assert [o.rank_ended.rank for o in await job.exits(2)] == [2, 0]


async def test_an_agent_killed_in_the_middle_of_a_launch(agent: RunningAgent) -> None:
    job = Job(agent, COUNTED, ranks=12)
    await job.prepare()
    launch = asyncio.create_task(job.launch())
    await first_pid(job)
    agent.kill()
    with pytest.raises(AgentUnreachable):
        await launch
    await agent.start()
    reply = await job.launch()  # an activity's next attempt repeats the launch like this
    await job.entered()
    await until(lambda: all(entries(job).values()), "all ranks are in the script")
    assert entries(job) == {rank.rank: [rank.pid] for rank in reply.ranks}, "each rank was started once"
    assert len(reply.ranks) == 12
    await job.release()
    assert not any(alive(rank.pid) for rank in reply.ranks)


async def test_a_fork_server_that_is_silent_while_the_agent_restarts_keeps_its_ranks(
    agent: RunningAgent, job: Job
) -> None:
    server = await fork_server(agent, job)
    launched = await job.launch()
    await job.entered()
    agent.kill()
    os.kill(server, signal.SIGSTOP)
    try:
        await agent.start()
        assert await fork_server(agent, job) == 0, "the fork server is suspended, so the agent does not know it yet"
    finally:
        os.kill(server, signal.SIGCONT)
    while await fork_server(agent, job) != server:  # noqa: ASYNC110 - there is no event
        await asyncio.sleep(0.05)
    await asyncio.sleep(2.5)  # a forgotten server looks for its socket every 2 s, and ends with its ranks
    assert all(alive(rank.pid) for rank in launched.ranks)
    let_end(job, 0)
    exited = (await job.exits(1))[0].rank_ended
    assert (exited.rank, exited.exit.value) == (0, 5), "the agent gets exits from the fork server again"


async def test_a_fork_server_without_its_ready_file_keeps_its_ranks(agent: RunningAgent, job: Job) -> None:
    server = await fork_server(agent, job)
    launched = await job.launch()
    await job.entered()
    agent.kill()
    for path in agent.fork_servers.glob("*.ready"):
        path.unlink()  # an agent of an older release made no such file
    await agent.start()
    await asyncio.sleep(2.5)
    assert await fork_server(agent, job) == server
    assert all(alive(rank.pid) for rank in launched.ranks)


async def test_step_records_survive_without_a_gap_or_a_double(agent: RunningAgent) -> None:
    job = Job(agent, REPORTING, ranks=1)
    await job.prepare()
    await job.launch()
    await job.progress(lambda p: p.ranks[0].completed_steps > 30)
    agent.kill()
    path = agent.state / "jobs" / job.name / "steps-0.bin"
    with path.open("ab") as file:
        file.write(b"torn")
    await agent.start()
    done = (await job.progress(lambda p: p.ranks[0].completed_steps > 150)).ranks[0].completed_steps
    await job.stop()
    replies = [r async for r in agent.client.steps(pb.StepsRequest(job=job.name, rank=0))]
    steps = [s.step for r in replies for s in r.records]
    assert steps == list(range(len(steps)))
    assert len(steps) >= done
    await job.release()


async def test_sigterm_ends_the_agent_only(agent: RunningAgent, job: Job) -> None:
    launched = await job.launch()
    await job.entered()
    agent.kill(signal.SIGTERM)
    assert all(alive(rank.pid) for rank in launched.ranks)
    await agent.start()
    assert all(rank.alive for rank in (await agent.client.describe()).jobs[0].ranks)


async def test_shared_memory_of_forgotten_jobs_is_swept(agent: RunningAgent) -> None:
    agent.kill()
    (agent.shm / "stale").mkdir()
    (agent.shm / "stale" / "checkpoint-0").write_bytes(bytes(4096))
    await agent.start()
    assert not agent.left()


async def test_what_a_full_memory_cut_short_does_not_hold_up_the_end(agent: RunningAgent, job: Job) -> None:
    await job.launch()
    unfinished = agent.shm / job.name / "report-0-2.new"  # the next launch found no room for this file
    unfinished.write_bytes(b"")
    await job.stop()
    await job.release()
    assert not unfinished.parent.exists()


async def test_a_fork_server_that_nobody_can_find_ends(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("lost")
    async with running_agent(folder) as agent:
        job = Job(agent, COUNTED, ranks=1)
        server = (await job.prepare()).fork_server_pid
        rank = (await job.launch()).ranks[0].pid
        agent.kill()
        for path in agent.fork_servers.glob("*.sock"):
            path.unlink()
        await until(lambda: not alive(server) and not alive(rank), "the server and its rank end")
        for path in sorted(agent.shm.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()


async def test_the_end_of_a_rank_is_told_though_its_number_was_given_away(agent: RunningAgent, job: Job) -> None:
    server = await fork_server(agent, job)
    launched = await job.launch()
    await job.entered()
    agent.kill()
    os.kill(server, signal.SIGKILL)
    os.kill(launched.ranks[1].pid, signal.SIGKILL)
    with a_stranger() as stranger:
        change_record(agent, job, lambda record: record["ranks"][1].update(pid=stranger.pid))
        await agent.start()
        exited = (await job.exits(1))[0].rank_ended
        assert (exited.rank, exited.exit.kind) == (1, pb.Exit.UNKNOWN)
        assert all(alive(launched.ranks[rank].pid) for rank in (0, 2))
        await job.stop()
        assert stranger.poll() is None, "the process with the reused pid belongs to no job, so it must not be killed"


async def test_nothing_is_looked_for_that_ran_before_the_machine_was_started_anew(
    agent: RunningAgent, job: Job
) -> None:
    launched = await job.launch()
    await job.entered()
    server = await fork_server(agent, job)
    agent.kill()
    for pid in (server, *(rank.pid for rank in launched.ranks)):
        os.kill(pid, signal.SIGKILL)
    with a_stranger() as stranger:

        def another_boot(record: dict[str, Any]) -> None:
            """After a reboot, pids and start times may be the same as before."""
            pid, ticks = stranger.pid, start_ticks(stranger.pid)
            record["boot"] = "another"
            record["fork_server_pid"], record["fork_server_ticks"] = pid, ticks
            for rank in record["ranks"]:
                rank["pid"], rank["start_ticks"] = pid, ticks

        change_record(agent, job, another_boot)
        await agent.start()
        exits = [one.rank_ended for one in await job.exits(3)]
        assert {(one.rank, one.exit.kind) for one in exits} == {(rank, pb.Exit.UNKNOWN) for rank in range(3)}
        await job.stop()
        assert stranger.poll() is None


@contextlib.contextmanager
def a_stranger() -> Iterator[subprocess.Popen[bytes]]:
    """A process that has nothing to do with any job."""
    process = subprocess.Popen(["sleep", "600"], start_new_session=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def change_record(agent: RunningAgent, job: Job, change: Callable[[dict[str, Any]], None]) -> None:
    path = agent.shm / "_agent" / "jobs" / f"{job.name}.json"
    record = json.loads(path.read_text())
    record["revision"] += 1000  # the copy with the higher revision counts: this one, and not the one on disk
    change(record)
    path.write_text(json.dumps(record))
