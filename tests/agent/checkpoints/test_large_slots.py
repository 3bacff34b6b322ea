"""With states of 100 GB per rank, a Stop reads only headers, and a restore reads only the chosen step."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from agent.v1 import agent_pb2 as pb
from everstep.slots.file import SlotFile
from everstep.slots.format import SAVED, StoredSlot, capacity_for, file_bytes, pack_file, slot_at
from everstep.slots.owner import SlotOwner
from everstep.slots.reader import held
from tests.agent.agents import Job, RunningAgent

pytestmark = pytest.mark.asyncio(loop_scope="module")

SLEEPER = "import time; time.sleep(600)"
GB = 10**9
STATE = 100 * GB
SLOTS = 4
ANSWER = 2_000_000
"""The number of bytes that a Stop may read. It reads logs, ``/proc`` and headers."""


@pytest_asyncio.fixture(loop_scope="module")
async def job(agent: RunningAgent) -> AsyncIterator[Job]:
    found = Job(agent, SLEEPER)
    await found.prepare()
    await found.launch()
    await found.entered()
    yield found
    await found.release()


def owner(job: str, rank: int) -> SlotOwner:
    return SlotOwner(job, "", rank)


def hollow(path: Path, state: int, steps: range) -> None:
    """Write a sparse checkpoint file of full size: only headers take memory, and payloads read as zeros.

    The folder has the name of the job.
    """
    room = capacity_for(state)
    with path.open("wb", buffering=0) as file:
        file.truncate(file_bytes(state, len(steps)))
        file.write(pack_file(len(steps), owner(path.parent.name, SlotOwner.outside_a_job(path).rank)))
        for index, step in enumerate(steps):
            slot = StoredSlot(step, 1, SAVED, state, 0, 4711, step, slot_at(len(steps)) + index * room, room)
            os.pwrite(file.fileno(), slot.pack(), slot_at(index))


def bytes_read(agent: RunningAgent) -> int:
    """Return the number of bytes that the agent has read from files and sockets since its start."""
    assert agent.process
    lines = Path(f"/proc/{agent.process.pid}/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])


async def stop(job: Job, verify_bytes: int | None) -> list[pb.HeldCheckpoint]:
    request = pb.StopRequest(job=job.name, generation=1, verify_bytes=verify_bytes)
    return list((await job.agent.client.stop(request, timeout_s=60)).checkpoints)


def own(rank: int, step: int) -> pb.ShardSource:
    return pb.ShardSource(rank=rank, completed_steps=step, tier=pb.HeldCheckpoint.OWN, machine="m1")


async def restore(job: Job, *shards: pb.ShardSource) -> list[pb.ShardRestored]:
    request = pb.RestoreRequest(job=job.name, shards=shards, checkpoint=pb.CheckpointOptions(slots=SLOTS))
    return list((await job.agent.client.restore(request, timeout_s=60)).shards)


async def test_a_stop_lists_800_gb_of_slots_without_reading_them(agent: RunningAgent, job: Job) -> None:
    for rank in (0, 1):
        hollow(agent.shm / job.name / f"checkpoint-{rank}", STATE, range(20, 20 + SLOTS))
    before = bytes_read(agent)

    found = await stop(job, verify_bytes=256 * 10**6)

    assert bytes_read(agent) - before < ANSWER
    assert sum(one.bytes for one in found) == 2 * SLOTS * STATE
    assert {(one.rank, one.completed_steps) for one in found} == {(r, s) for r in (0, 1) for s in range(20, 24)}
    assert all(one.valid and one.unverified for one in found), (
        "a copy is valid by its header, and its contents are reported as unverified"
    )


async def test_a_damaged_header_is_named_without_reading_the_payload(agent: RunningAgent, job: Job) -> None:
    path = agent.shm / job.name / "checkpoint-0"
    hollow(path, STATE, range(20, 20 + SLOTS))
    with path.open("r+b", buffering=0) as file:
        at = slot_at(2)
        os.pwrite(file.fileno(), bytes([os.pread(file.fileno(), 1, at + 24)[0] ^ 1]), at + 24)
        os.truncate(path, slot_at(SLOTS) + 3 * capacity_for(STATE) + STATE // 2)

    found = {one.completed_steps: one for one in await stop(job, verify_bytes=0)}

    assert [step for step, one in found.items() if one.valid] == [20, 21]
    assert "header does not match its checksum" in found[22].reason
    assert "truncated" in found[23].reason


@pytest.mark.parametrize(
    ("limit", "verified"), [(None, True), (8 * 200_000, True), (8 * 200_000 - 1, False), (0, False)]
)
async def test_small_slots_are_verified_by_the_stop_itself(
    agent: RunningAgent, job: Job, limit: int | None, verified: bool
) -> None:
    for rank in (0, 1):
        hollow(agent.shm / job.name / f"checkpoint-{rank}", 200_000, range(20, 20 + SLOTS))

    found = await stop(job, verify_bytes=limit)

    assert [one.valid for one in found] == [not verified] * 8, (
        "the contents do not match their checksum, so a verified copy is invalid"
    )
    assert all(one.unverified != verified for one in found)


async def test_a_restore_of_all_ranks_reads_only_the_chosen_step(agent: RunningAgent, job: Job) -> None:
    size = 48_000_000
    await stop(job, verify_bytes=0)
    for rank in (0, 1):
        path = agent.shm / job.name / f"checkpoint-{rank}"
        path.unlink(missing_ok=True)
        file = SlotFile(path, slots=SLOTS, owner=owner(job.name, rank), generation=1)
        for step in range(20, 20 + SLOTS):
            file.begin(b"tree", size)
            with file.tensors() as view:
                view[:8] = step.to_bytes(8, "little")
            file.commit(step)
        file.close()
    at = slot_at(SLOTS) + capacity_for(size + 4) + size // 2
    with (agent.shm / job.name / "checkpoint-1").open("r+b", buffering=0) as damaged:
        os.pwrite(damaged.fileno(), b"\1", at)
    before = bytes_read(agent)

    newest = await restore(job, own(0, 23), own(1, 23))

    read = bytes_read(agent) - before
    assert 2 * size <= read < 2 * size + ANSWER, "each chosen slot is read once, and no other slot"
    assert [(one.ok, one.bytes) for one in newest] == [(True, 0), (True, 0)]

    older = {one.rank: one for one in await restore(job, own(0, 21), own(1, 21))}
    assert older[0].ok
    assert (older[1].ok, older[1].damaged) == (False, True)
    assert older[1].reason == "its contents do not match their checksum"
    [gone] = await restore(job, own(0, 7))
    assert gone.damaged and "does not hold step 7" in gone.reason


async def test_a_slot_with_damaged_contents_is_found_before_a_rank_restores_it(agent: RunningAgent, job: Job) -> None:
    path = agent.shm / job.name / "checkpoint-0"
    hollow(path, GB, range(20, 22))
    assert all(one.valid for one in held(path, verify=False))
    await stop(job, verify_bytes=0)

    [found] = await restore(job, own(0, 21))

    assert (found.ok, found.damaged) == (False, True)


async def test_a_launch_forgets_own_slots_of_later_steps_whatever_its_ranks_do(agent: RunningAgent, job: Job) -> None:
    """A rank may run a script without the library, as here, or be killed first. So the agent itself forgets them."""
    await job.stop()
    paths = [agent.shm / job.name / f"checkpoint-{rank}" for rank in (0, 1)]
    for path in paths:
        hollow(path, 200_000, range(20, 20 + SLOTS))
    request = job.launch_request(2)
    request.resume_step = 21
    await agent.client.launch(request, timeout_s=60)

    for path in paths:
        assert {one.completed_steps for one in held(path, verify=False) if one.valid} == {20, 21}
    await job.stop(2)
