"""What an earlier run of a job's name left on a machine is never used by the new run.

The earlier run ends while the agent of one machine is down, so this agent does not learn of it. Generations do not
distinguish the runs here, since both runs count from 1. This happens after a loss of the ledger.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from agent.v1 import agent_pb2 as pb
from everstep.errors import Fenced
from everstep.slots.file import SlotFile
from everstep.slots.owner import SlotOwner
from tests.agent.agents import RunningAgent
from tests.agent.checkpoints.peers.machines import SIZE, Machines, job_on, running_agents, runs, state

OWN, BACKUP = pb.HeldCheckpoint.OWN, pb.HeldCheckpoint.BACKUP
FIRST, SECOND = "20261121-100000.000-aaaaaaaa", "20261121-110000.000-bbbbbbbb"

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def agents(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[list[RunningAgent]]:
    async with running_agents(tmp_path_factory.mktemp("agents"), 2, "--prewarm") as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def job(agents: list[RunningAgent], tmp_path: Path) -> AsyncIterator[Machines]:
    """The first run. Both machines have copies in memory."""
    async with job_on([], tmp_path) as found:
        found.agents = agents
        found.run = FIRST
        found.in_step = False  # the ranks of one machine continue when those of the other are gone
        await found.prepare()
        await found.launch(pause=0.02)
        for index in (0, 1):
            await found.until(index, lambda rank: rank.saved.backup_step >= 5, "backups succeed")
        yield found


async def release(job: Machines, index: int, run: str) -> pb.ReleaseReply:
    request = pb.ReleaseRequest(request_id=f"release-{run}", job=job.job, run=run)
    return await job.agents[index].client.release(request, timeout_s=60)


async def pids(job: Machines, index: int) -> list[int]:
    found = (await job.agents[index].client.describe()).jobs
    return [rank.pid for one in found if one.job == job.job for rank in one.ranks if rank.alive]


async def held(job: Machines, index: int) -> list[pb.HeldCheckpoint]:
    reply = await job.agents[index].client.checkpoints(pb.CheckpointsRequest(job=job.job))
    return [one for one in reply.checkpoints if one.valid]


async def test_remains_in_memory_are_thrown_away_and_the_new_run_has_generations_of_its_own(job: Machines) -> None:
    old = await pids(job, 1)
    job.agents[1].kill()  # its ranks continue to live
    await release(job, 0, FIRST)
    await job.agents[1].start()
    left = await held(job, 1)
    assert {(one.tier, one.run) for one in left} == {(OWN, FIRST), (BACKUP, FIRST)}

    job.run = SECOND
    await job.prepare()
    assert await held(job, 1) == []
    assert not any(map(runs, old)), "no rank of the earlier run may live"

    await job.launch(pause=0.02)
    for index in (0, 1):
        await job.until(index, lambda rank: rank.saved.backup_step >= 3, "the new run backs up")
    replies = await job.stop(1)
    for index, reply in enumerate(replies):
        assert not reply.unknown
        assert {one.run for one in reply.checkpoints} == {SECOND}
        for one in reply.checkpoints:
            if one.valid:
                name = "checkpoint" if one.tier == OWN else "backup"
                found = job.payload(index, f"{name}-{one.rank}", one.completed_steps)
                assert found == state(one.rank, one.completed_steps, run=SECOND)


async def test_a_stop_of_the_new_run_is_not_answered_with_the_earlier_ones_evidence(job: Machines) -> None:
    """The machine was silent when the new run was prepared. So the incident's stop is its first command of this run."""
    job.agents[1].kill()
    await release(job, 0, FIRST)
    await job.agents[1].start()
    job.run = SECOND

    _, reply = await job.stop(1)

    assert reply.unknown
    assert (list(reply.ranks), list(reply.checkpoints)) == ([], [])
    await job.prepare()
    with pytest.raises(Fenced):
        await job.launch(1)
    await job.launch(2)


async def test_ranks_of_the_earlier_run_that_live_on_somewhere_back_up_nothing_any_more(job: Machines) -> None:
    job.run = SECOND
    request = pb.PrepareRequest(request_id="prepare", job=job.job, run=SECOND)
    await job.agents[0].client.prepare(request, timeout_s=60)

    await job.until(1, lambda rank: rank.saved.backup_problem != "", "an old connection is refused")
    job.agents[1].kill()
    await job.agents[1].start()
    refused = f"m1 has run {SECOND} of {job.job}, and m2 asks for {FIRST}"
    await job.until(
        1, lambda rank: refused in rank.saved.backup_problem, "a new connection is refused too, with the reason"
    )

    assert await held(job, 0) == []
    assert not (job.shm(0) / "backup-1").exists()


async def test_late_commands_of_the_earlier_run_change_nothing(job: Machines) -> None:
    job.run = SECOND
    await job.prepare()
    await job.launch(pause=0.02)
    await job.until(0, lambda rank: rank.saved.own_step >= 2, "the rank saves")
    living = await pids(job, 0)

    assert (await release(job, 0, FIRST)).bytes_freed == 0
    job.run = FIRST
    with pytest.raises(Fenced, match=f"has run {SECOND} of .*, which is newer than {FIRST}"):
        await job.stop(9)
    with pytest.raises(Fenced, match="which is newer"):
        await job.prepare()

    assert await pids(job, 0) == living
    assert all(map(runs, living))

    for index in (0, 1):
        await release(job, index, SECOND)
    await job.prepare()  # the newer run is released, so an older run may be prepared, as after a clock was set back


async def test_an_agent_that_lost_its_record_still_knows_whose_the_memory_is(job: Machines) -> None:
    job.agents[1].kill()
    (job.agents[1].state / "jobs" / job.job / "job.json").write_text("damaged")
    await job.agents[1].start()

    (reply,) = await job.stop(1, 1)

    assert {one.run for one in reply.checkpoints} == {FIRST}
    assert any(one.valid and one.tier == OWN for one in reply.checkpoints), "the state of the ranks must be kept"


async def test_another_save_of_the_step_is_not_taken_for_the_one_that_was_chosen(job: Machines) -> None:
    """The slot and the backup are of an abandoned generation, and have the very step that is to be restored."""
    replies = await job.stop(1)
    chosen = max(
        (one for one in replies[1].checkpoints if one.valid and one.tier == BACKUP and one.rank == 0),
        key=lambda one: one.completed_steps,
    )
    step = chosen.completed_steps
    own = job.shm(0) / "checkpoint-0"
    abandoned = b"x" * SIZE
    own.unlink()
    with contextlib.closing(SlotFile(own, slots=3, owner=SlotOwner(job.job, job.run, 0), generation=1)) as file:
        file.begin(b"{}", SIZE)
        file.tensors()[:] = abandoned
        file.commit(step)

    async def restore(name: str, index: int = 0, **source: object) -> pb.ShardRestored:
        given = {"rank": 0, "completed_steps": step, "tier": BACKUP, "saved_ns": chosen.saved_ns} | source
        request = pb.RestoreRequest(
            request_id=name,
            job=job.job,
            shards=[pb.ShardSource(**given)],  # type: ignore[arg-type]
            checkpoint=pb.CheckpointOptions(slots=3),
            run=job.run,
        )
        return (await job.agents[index].client.restore(request, timeout_s=60)).shards[0]

    absent = await restore("own", tier=OWN)
    assert (absent.ok, absent.damaged) == (False, True)
    assert "another save of it" in absent.reason

    peer = job.agents[1].address
    other = await restore("other", address=peer, saved_ns=chosen.saved_ns + 1)
    assert (other.ok, other.damaged) == (False, True)
    assert "holds another save of step" in other.reason
    assert job.payload(0, "checkpoint-0", step) == abandoned

    brought = await restore("brought", address=peer)
    assert brought.ok
    assert brought.bytes > SIZE
    assert job.payload(0, "checkpoint-0", step) == state(0, step, run=FIRST)

    # Now the peer itself runs the rank. Its backup is another save than the chosen one.
    here = await restore("here", index=1, saved_ns=chosen.saved_ns + 1)
    assert (here.ok, here.damaged) == (False, True)
    assert "holds another save" in here.reason
    assert (await restore("fine", index=1)).ok
