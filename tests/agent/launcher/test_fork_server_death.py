"""A fork server is killed or does not answer. Here the agent itself started it, as in production."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from agent.v1 import agent_pb2 as pb
from everstep.errors import AgentError
from tests.agent.agents import Job, RunningAgent, alive, until
from tests.agent.counted import COUNTED, entries, first_pid, fork_server, let_end

pytestmark = pytest.mark.asyncio(loop_scope="module")
ALONE = True
"""A setting for tests/agent/conftest.py: the agent starts its fork servers itself."""


@pytest_asyncio.fixture(loop_scope="module")
async def job(agent: RunningAgent) -> AsyncIterator[Job]:
    found = Job(agent, COUNTED, ranks=3)
    await found.prepare()
    yield found
    await found.release()


async def test_a_fork_server_killed_in_the_middle_of_a_launch(agent: RunningAgent) -> None:
    job = Job(agent, COUNTED, ranks=12)
    server = (await job.prepare()).fork_server_pid
    launch = asyncio.create_task(job.launch())
    await first_pid(job)
    os.kill(server, signal.SIGKILL)
    reply = await launch
    await job.entered()
    await until(lambda: all(entries(job).values()), "all ranks are in the script")
    assert entries(job) == {rank.rank: [rank.pid] for rank in reply.ranks}, "each rank was started once"
    stopped = await job.stop()
    assert len(stopped.ranks) == 12
    assert not any(alive(rank.pid) for rank in reply.ranks)
    await job.release()


async def test_ranks_outlive_their_fork_server(agent: RunningAgent, job: Job) -> None:
    reply = await job.prepare()
    launched = await job.launch()
    await job.entered()
    os.kill(reply.fork_server_pid, signal.SIGKILL)
    died = (await job.observe(1, "fork_server_died"))[0].fork_server_died
    assert (died.pid, died.exit.kind, died.exit.value) == (reply.fork_server_pid, pb.Exit.SIGNAL, signal.SIGKILL)

    async def next_server() -> int:
        return (await agent.client.describe()).jobs[0].fork_server_pid

    async with asyncio.timeout(30):  # a new server starts before a command needs it
        while await next_server() in (0, reply.fork_server_pid):  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.05)
    assert all(alive(rank.pid) for rank in launched.ranks)
    let_end(job, 0)
    exited = (await job.exits(1))[0].rank_ended
    assert (exited.rank, exited.exit.value) == (0, 5), "the agent is now the rank's parent, so it knows the exit code"
    evidence = await job.stop()
    assert [rank.exit.kind for rank in evidence.ranks] == [pb.Exit.CODE, pb.Exit.SIGNAL, pb.Exit.SIGNAL]
    assert not any(alive(rank.pid) for rank in launched.ranks)
    assert len((await job.launch(2)).ranks) == 3
    assert (await agent.client.describe()).jobs[0].fork_server_pid not in (0, reply.fork_server_pid)


async def test_agent_and_fork_server_are_killed_at_once(agent: RunningAgent, job: Job) -> None:
    server = (await agent.client.describe()).jobs[0].fork_server_pid
    launched = await job.launch()
    await job.entered()
    agent.kill()
    os.kill(server, signal.SIGKILL)
    let_end(job, 1)
    await until(lambda: not alive(entries(job)[1][0]), "rank 1 ended")
    await agent.start()
    exited = (await job.exits(1))[0].rank_ended
    assert (exited.rank, exited.exit.kind) == (1, pb.Exit.UNKNOWN), (
        "rank 1 ended while it had no parent that could note its exit code"
    )
    with pytest.raises(AgentError, match="still lives"):
        await job.launch(2)
    await job.stop()
    await until(lambda: not any(alive(rank.pid) for rank in launched.ranks), "all ranks are gone")
    assert len((await job.launch(2, "again")).ranks) == 3


async def test_a_silent_fork_server_does_not_delay_a_restart(agent: RunningAgent, job: Job) -> None:
    server = await fork_server(agent, job)
    launched = await job.launch()
    await job.entered()
    agent.kill()
    os.kill(server, signal.SIGSTOP)
    await agent.start()
    evidence = await job.stop()
    assert [rank.stopped_by_us for rank in evidence.ranks] == [True] * 3
    again = await job.launch(2)
    # The ranks' parent was suspended and then killed. So init inherits the ranks, and has to collect them first.
    await until(lambda: not any(alive(rank.pid) for rank in launched.ranks), "the old ranks are gone")
    assert all(alive(rank.pid) for rank in again.ranks)
    await until(lambda: not alive(server), "the silent server is gone, since two servers could start a rank twice")
