"""A rank that takes long to die is not reported as dead and not given up, and the caller gets its name."""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from temporalio.testing import ActivityEnvironment

from activities.agents.release_machines import ReleaseMachines
from activities.agents.stop_ranks import StopRanks
from agent.client import AgentClients
from agent.v1 import agent_pb2 as pb
from everstep.errors import AgentError, StillDying
from everstep.model.job import JobSpec, PlacedJob
from everstep.model.machine import Machine
from tests.activities.performing import perform
from tests.agent.agents import Job, RunningAgent, alive, until

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]

SLEEP = "import threading, time; threading.Thread(target=time.sleep, args=(600,)).start(); time.sleep(600)"
FREEZER = Path("/sys/fs/cgroup/freezer")


class Freezer:
    """A cgroup that holds killed processes until they are released.

    So they take as long to die as processes whose large memory the kernel has to free first.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def hold(self, pid: int) -> None:
        (self._folder / "cgroup.procs").write_text(str(pid))
        self._state("FROZEN")

    def hold_a_thread(self, pid: int) -> None:
        """Hold a thread of a process that is not its first one. A killed process then begins to end, but stays."""
        other = next(int(task.name) for task in Path(f"/proc/{pid}/task").iterdir() if task.name != str(pid))
        (self._folder / "tasks").write_text(str(other))
        self._state("FROZEN")

    def let_go(self) -> None:
        self._state("THAWED")

    def _state(self, wanted: str) -> None:
        path = self._folder / "freezer.state"
        path.write_text(wanted)
        while path.read_text().strip() != wanted:
            time.sleep(0.01)


@pytest.fixture
def freezer() -> Iterator[Freezer]:
    folder = FREEZER / f"everstep-test-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"processes cannot be frozen here (cgroup v1, root): {error}")
    found = Freezer(folder)
    yield found
    found.let_go()
    while (folder / "cgroup.procs").read_text():
        time.sleep(0.01)
    folder.rmdir()


@pytest_asyncio.fixture(loop_scope="module")
async def job(agent: RunningAgent) -> AsyncIterator[Job]:
    found = Job(agent, SLEEP)
    await found.prepare()
    await found.launch()
    await found.entered()
    yield found
    await found.release()


@pytest.mark.parametrize("with_server", [True, pytest.param(False, marks=pytest.mark.wide)])
async def test_a_rank_that_takes_long_to_die_is_named_and_the_stop_is_repeated(
    agent: RunningAgent, job: Job, freezer: Freezer, with_server: bool
) -> None:
    first, second = [rank.pid for rank in (await job.entered()).ranks]
    freezer.hold(second)
    if not with_server:  # without the fork server, the agent itself kills the ranks
        os.kill((await agent.client.describe()).jobs[0].fork_server_pid, 9)

    with pytest.raises(StillDying, match=rf"rank 1 \(pid {second}, state .\) has been dying for 1\d s"):
        await job.stop()
    assert alive(second) and not alive(first)
    with pytest.raises(AgentError, match="rank 1 of generation 1 still lives"):
        await job.launch(2)

    freezer.let_go()
    while alive(second):  # noqa: ASYNC110 - there is no event
        await asyncio.sleep(0.02)
    reply = await job.stop()  # the same request is executed again, because it failed
    assert [rank.stopped_by_us for rank in reply.ranks] == [True, True]
    assert (await job.launch(2)).generation == 2


@pytest.mark.parametrize("with_server", [True, pytest.param(False, marks=pytest.mark.wide)])
async def test_an_end_is_reported_while_the_process_still_exists(
    agent: RunningAgent, job: Job, freezer: Freezer, with_server: bool
) -> None:
    """It can take minutes until a killed rank with much memory no longer exists."""
    first, second = [rank.pid for rank in (await job.entered()).ranks]
    freezer.hold_a_thread(second)
    os.kill(second, 9)

    [told] = await job.exits(1)
    assert (told.rank_ended.rank, told.rank_ended.exit.kind, told.rank_ended.exit.value) == (1, pb.Exit.SIGNAL, 9)
    assert alive(second), "the end is reported although the process still exists"
    if with_server:
        agent.kill()  # the next agent knows which ends were reported
        await agent.start()
    else:  # without the fork server, the agent itself kills the ranks
        os.kill((await agent.client.describe()).jobs[0].fork_server_pid, 9)
    stopping = asyncio.create_task(job.stop())
    while alive(first):  # noqa: ASYNC110 - there is no event
        await asyncio.sleep(0.02)
    assert alive(second) and not stopping.done(), "the stop waits for rank 1"

    freezer.let_go()
    stopped = await stopping
    assert [rank.stopped_by_us for rank in stopped.ranks] == [True, False], "rank 1 had begun to end by itself"
    assert stopped.ranks[1].exit == told.rank_ended.exit
    next_one = (await job.launch(2)).ranks[0]
    os.kill(next_one.pid, 9)
    first_told, second_told = await job.exits(2)
    assert (first_told.id, second_told.generation) == (told.id, 2), (
        "the end of rank 1 was reported once, before the end in generation 2"
    )


async def test_an_exec_of_a_rank_is_no_end(agent: RunningAgent) -> None:
    """The kernel sends the same notification for an exec and for an end."""
    job = Job(agent, "import os; os.execv('/bin/sh', ['sh', '-c', 'echo began; exec sleep 600'])", ranks=1)
    await job.prepare()
    [rank] = (await job.launch()).ranks
    log = agent.state / "jobs" / job.name / "logs" / "rank-0.out"
    await until(lambda: log.exists() and b"began" in log.read_bytes(), "the rank became the other program")
    os.kill(rank.pid, 15)
    [told] = await job.exits(1)
    assert (told.rank_ended.exit.kind, told.rank_ended.exit.value) == (pb.Exit.SIGNAL, 15), (
        "the exec was not reported as an end"
    )
    await job.release()


async def test_activities_wait_for_dying_ranks_and_name_them(agent: RunningAgent, job: Job, freezer: Freezer) -> None:
    pid = (await job.entered()).ranks[0].pid
    freezer.hold(pid)
    pool, said = AgentClients(), list[str]()
    environment = ActivityEnvironment()
    environment.on_heartbeat = lambda *details: said.extend(map(str, details))
    spec = JobSpec(name=job.name, script="/job.py", ranks_per_machine=2)
    placed = PlacedJob(spec=spec, machines=[Machine(name="m1", address=agent.address)])
    stop = StopRanks(job=placed, generation=1, dying_s=12.0)

    found = await perform(stop, environment, agents=pool)

    [(machine, ranks)] = found.dying.items()
    assert machine == "m1"
    assert ranks.startswith(f"rank 0 (pid {pid}, state ")
    assert (found.held, found.exits, found.unreachable) == ([], [], []), (
        "a machine with a dying rank reports nothing else"
    )
    freed = await perform(ReleaseMachines(job=placed, dying_s=0.0), environment, agents=pool)
    assert freed == 0, "the job's memory is not freed while the rank lives"
    assert any("has been dying for" in text for text in said)

    freezer.let_go()
    gone = await perform(stop, environment, agents=pool)
    assert not gone.dying
    assert {rank for end in gone.exits for rank in end.ranks} == {0, 1}
    await pool.close()
