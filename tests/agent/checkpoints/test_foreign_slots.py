"""A machine never lists, sends or restores a slot of another rank, job or run as its own."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from agent.checkpoints.peers.send_slot import Fate
from agent.v1 import agent_pb2 as pb
from everstep.slots.file import SlotFile
from everstep.slots.owner import SlotOwner
from everstep.slots.reader import SlotReader
from tests.agent.agents import Job, RunningAgent
from tests.agent.checkpoints.peers.sides import JOB, side
from tests.agent.checkpoints.peers.test_transfer import send
from tests.everstep.slots.saved import save

pytestmark = pytest.mark.asyncio(loop_scope="module")

SLEEPER = "import time; time.sleep(600)"


@pytest_asyncio.fixture(loop_scope="module")
async def job(agent: RunningAgent) -> AsyncIterator[Job]:
    found = Job(agent, SLEEPER)
    await found.prepare()
    await found.launch()
    await found.entered()
    yield found
    await found.release()


def saved(path: Path, owner: SlotOwner, *steps: int) -> None:
    with contextlib.closing(SlotFile(path, slots=3, owner=owner, generation=1)) as file:
        for step in steps:
            save(file, step, 5000)


async def test_an_agent_refuses_the_slots_of_another_rank(agent: RunningAgent, job: Job) -> None:
    """Rank 1 has a copy of the file of rank 0, byte by byte: its header is intact, and so is each slot."""
    folder = agent.shm / job.name
    saved(folder / "checkpoint-0", SlotOwner(job.name, "", 0), 7)
    (folder / "checkpoint-1").write_bytes((folder / "checkpoint-0").read_bytes())

    request = pb.StopRequest(job=job.name, generation=1, verify_bytes=0)
    reply = await agent.client.stop(request, timeout_s=60)

    valid = [(one.rank, one.completed_steps) for one in reply.checkpoints if one.valid]
    assert valid == [(0, 7)]
    says = f"it has the state of rank 0 of job {job.name}, and not of rank 1 of job {job.name}"
    assert [one.reason for one in reply.checkpoints if one.rank == 1] == [says]

    shards = [pb.ShardSource(rank=rank, completed_steps=7, tier=pb.HeldCheckpoint.OWN, machine="m1") for rank in (0, 1)]
    again = pb.RestoreRequest(job=job.name, shards=shards, checkpoint=pb.CheckpointOptions(slots=3))
    found = {one.rank: one for one in (await agent.client.restore(again, timeout_s=60)).shards}
    assert found[0].ok
    assert (found[1].ok, found[1].damaged) == (False, True)
    assert says in found[1].reason


@pytest.mark.parametrize(
    "other",
    [SlotOwner(JOB, "", 4), SlotOwner("bert", "", 5), SlotOwner(JOB, "20261121-080000.000-aaaaaaaa", 5)],
    ids=str,
)
async def test_a_peer_does_not_keep_a_slot_of_another_owner(other: SlotOwner) -> None:
    """The sender claims that it is rank 5's. The checksum belongs to another owner."""
    with side() as mine, side() as peer:
        path = mine.shm / "checkpoint-5"
        saved(path, other, 7)
        with contextlib.closing(SlotReader(path)) as reader:
            (header,) = reader.headers()
        outcome = send(path, header, peer.connect(), rank=5)
        assert outcome.fate is not Fate.KEPT
        assert peer.steps(5) == []
