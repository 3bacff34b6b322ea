"""Agents report over gRPC which copies their machines have, and how much room for copies is left."""

from __future__ import annotations

from typing import Any

from activities.agents.check_room import CheckRoom
from activities.agents.find_checkpoints import FindCheckpoints
from activities.agents.read_folder import FolderFound, ReadFolder
from agent.client import AgentClients
from agent.fake import FakeAgent
from agent.v1 import agent_pb2 as pb
from everstep.model.checkpoint_policy import CheckpointPolicy
from everstep.model.evidence import Evidence
from everstep.model.job import JobSpec, PlacedJob
from everstep.model.machine import Machine
from everstep.model.state_copy import Tier
from tests.activities.performing import perform
from tests.activities.spoken import HOST, serving

FOLDER = "/nfs/other/step-000000120"
SILENT = Machine(name="m9", address=f"{HOST}:1")


def holder(*held: pb.HeldCheckpoint, room: pb.Room | None = None) -> FakeAgent:
    """Return an agent that has the given copies."""
    return FakeAgent(checkpoints=pb.CheckpointsReply(checkpoints=held), describe=pb.DescribeReply(room=room))


async def run(given: Any) -> Any:
    pool = AgentClients()
    try:
        return await perform(given, agents=pool)
    finally:
        await pool.close()


def on_disk(rank: int, step: int = 120, *, root: str = "/nfs", **more: Any) -> pb.HeldCheckpoint:
    place = f"{root}/other/step-{step:09d}/rank-{rank}.safetensors"
    given = {"valid": True} | more
    return pb.HeldCheckpoint(rank=rank, completed_steps=step, tier=pb.HeldCheckpoint.DISK, place=place, **given)


async def test_disks_and_remote_storage_are_asked_where_the_job_keeps_them() -> None:
    agents = [holder(on_disk(0, saved_ns=5)), holder(pb.HeldCheckpoint(rank=1, completed_steps=121, valid=True))]
    policy = CheckpointPolicy(disk_path="/nfs", remote_url="s3://runs")
    spec = JobSpec(name="other", script="/job.py", machines=3, checkpoint=policy)
    async with serving(agents) as machines:
        given = FindCheckpoints(job=PlacedJob(spec=spec, machines=[*machines, SILENT]), patience_s=0.2)
        found: Evidence = await run(given)

    assert [(one.ranks.first, one.tier, one.machine) for one in found.held] == [
        (0, Tier.DISK, "m0"),
        (1, Tier.OWN, "m1"),
    ]
    assert found.unreachable == ["m9"]
    [asked] = agents[0].asked("checkpoints")
    assert (asked.job, asked.disk_path, asked.remote_url, asked.verify) == ("other", "/nfs", "s3://runs", False)


async def look(agents: list[FakeAgent], path: str = FOLDER, *, silent: bool = False) -> FolderFound:
    async with serving(agents) as machines:
        asked = [*machines, SILENT] if silent else machines
        given = ReadFolder(machines=asked, path=path, patience_s=0.2)
        found: FolderFound = await run(given)
        return found


async def test_a_folder_is_looked_at_by_every_machine_and_nothing_else_counts() -> None:
    whole = [on_disk(0), on_disk(1), on_disk(2, step=140), on_disk(3, root="/other-disk")]
    agents = [holder(*whole), holder(*whole)]

    found = await look(agents)

    assert found == FolderFound(step=120, ranks=2)
    [asked] = agents[0].asked("checkpoints")
    assert (asked.job, asked.disk_path) == ("other", "/nfs")


async def test_a_folder_that_is_damaged_or_seen_by_some_or_not_known_to_all_is_refused() -> None:
    whole = [on_disk(0), on_disk(1)]

    assert "m1 sees 1 of the 2 ranks" in (await look([holder(*whole), holder(on_disk(0))])).problem
    damaged = on_disk(1, valid=False, reason="its manifest is cut off")
    assert "rank 1: its manifest is cut off" in (await look([holder(on_disk(0), damaged)])).problem
    assert "m9 does not answer" in (await look([holder(*whole)], silent=True)).problem
    assert "is no checkpoint" in (await look([], "/nfs/other")).problem


async def test_the_room_of_each_machine_is_asked_and_a_silent_one_is_left_to_the_launch() -> None:
    gb = 10**9
    spec = JobSpec(
        name="job", script="/job.py", machines=3, checkpoint=CheckpointPolicy(state_mb_per_rank=1000, backup=False)
    )
    agents = [holder(room=pb.Room(shm_free=2 * gb, memory_available=100 * gb)), holder()]
    async with serving(agents) as machines:
        given = CheckRoom(job=PlacedJob(spec=spec, machines=[*machines, SILENT]), patience_s=0.2)
        found: str = await run(given)

    assert "2.00 GB" in found
    assert "3 slots need 3.05 GB" in found
