"""Copies are brought from where they are; what fails is named, and nothing is waited for in vain."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from temporalio.testing import ActivityEnvironment

from activities.agents.checkpoints import CheckpointActivities
from activities.messages import RestoreInput
from agent.client import AgentPool
from agent.v1 import agent_pb2 as pb
from agent.v1 import agent_pb2_grpc
from everstep.model.incident import CopyToRestore, Restored, StateCopy, Tier
from everstep.model.job import JobSpec
from everstep.model.machine import Machine
from tests.activities.spoken import HOST, serving

Answer = Callable[[pb.ShardSource], pb.ShardRestored]


def there(shard: pb.ShardSource) -> pb.ShardRestored:
    return pb.ShardRestored(rank=shard.rank, ok=True, bytes=100)


class Keeper(agent_pb2_grpc.AgentServicer):
    """Answers each shard by a function, and a repeated request id as the first time."""

    def __init__(self, answer: Answer = there) -> None:
        self.answer = answer
        self.asked: list[pb.RestoreRequest] = []
        self.replies: dict[str, pb.RestoreReply] = {}

    async def Restore(self, request: pb.RestoreRequest, context: Any) -> pb.RestoreReply:  # noqa: N802
        if request.request_id not in self.replies:
            self.asked.append(request)
            self.replies[request.request_id] = pb.RestoreReply(shards=map(self.answer, request.shards))
        return self.replies[request.request_id]

    @property
    def shards(self) -> list[pb.ShardSource]:
        return [shard for request in self.asked for shard in request.shards]


def keepers(*answers: Answer) -> list[Keeper]:
    """Four agents, the last of which answer as is said."""
    return [Keeper(answer) for answer in [*[there] * (4 - len(answers)), *answers]]  # type: ignore[abstract]


SPEC = JobSpec(name="job", script="/job.py", machines=4, ranks_per_machine=2, tp=2, pp=2)
"""Data-parallel groups: 0 2, 1 3, 4 6, 5 7."""


def copy(rank: int, tier: Tier = Tier.BACKUP, machine: str = "m0") -> CopyToRestore:
    return CopyToRestore(rank=rank, completed_steps=20, tier=tier, machine=machine)


async def restore(machines: Sequence[Machine], copies: Sequence[CopyToRestore], **more: Any) -> Restored:
    pool = AgentPool()
    patience = {"patience_s": 0.3, "reach_s": 0.0} | more
    given = RestoreInput.model_validate({"spec": SPEC, "machines": list(machines), "copies": list(copies)} | patience)
    try:
        return await asyncio.wait_for(ActivityEnvironment().run(CheckpointActivities(pool).restore, given), 60)
    finally:
        await pool.close()


async def test_each_machine_is_told_once_where_its_copies_are() -> None:
    agents = keepers()
    async with serving(agents) as machines:
        found = await restore(machines, [copy(4), copy(5), copy(6, Tier.DISK, "m3"), copy(7, machine="m1")])

    assert [len(agent.asked) for agent in agents] == [0, 0, 1, 1]
    assert [(one.rank, one.tier, one.machine, one.address) for one in agents[2].shards] == [
        (4, pb.HeldCheckpoint.BACKUP, "m0", machines[0].address),
        (5, pb.HeldCheckpoint.BACKUP, "m0", machines[0].address),
    ]
    [at_home, elsewhere] = agents[3].shards
    assert (at_home.address, elsewhere.address) == ("", machines[1].address)
    assert agents[2].asked[0].checkpoint.slots == SPEC.checkpoint.slots
    assert [one.rank for one in found.moved] == [4, 5, 6, 7]
    assert found.bytes == 400
    assert not found.failed + found.unreached
    assert not found.unreachable


async def test_a_damaged_copy_is_named_and_the_others_are_brought() -> None:
    def one_bad(shard: pb.ShardSource) -> pb.ShardRestored:
        if shard.rank == 4:
            return pb.ShardRestored(rank=4, damaged=True, reason="the payload's checksum does not hold")
        return there(shard)

    async with serving(keepers(one_bad, there)) as machines:
        found = await restore(machines, [copy(4), copy(5)])

    assert [one.rank for one in found.moved] == [5]
    reason = "the payload's checksum does not hold"
    assert found.failed == [
        StateCopy(rank=4, machine="m0", completed_steps=20, tier=Tier.BACKUP, valid=False, reason=reason)
    ]


@pytest.mark.parametrize("times", [1, 2])
async def test_a_copy_that_cannot_be_fetched_at_once_is_tried_again(times: int) -> None:
    tried: list[int] = []

    def later(shard: pb.ShardSource) -> pb.ShardRestored:
        tried.append(shard.rank)
        if tried.count(shard.rank) <= times and shard.rank == 4:
            return pb.ShardRestored(rank=4, reason="m0 is away")
        return there(shard)

    async with serving(keepers(later, there)) as machines:
        found = await restore(machines, [copy(4), copy(5)], reach_s=30.0)

    assert [one.rank for one in found.moved] == [4, 5]
    assert tried.count(5) == 1, "what is there is not brought again"


async def test_a_copy_that_stays_out_of_reach_is_not_called_damaged() -> None:
    def away(shard: pb.ShardSource) -> pb.ShardRestored:
        return pb.ShardRestored(rank=shard.rank, reason="m0 is away")

    async with serving(keepers(away, there)) as machines:
        found = await restore(machines, [copy(4)])

    assert not found.failed
    assert [(one.rank, one.reason, one.valid) for one in found.unreached] == [(4, "m0 is away", False)]


async def test_a_machine_that_stays_silent_is_named_and_holds_up_no_other() -> None:
    async with serving(keepers()[:3]) as machines:
        silent = Machine(name="m3", address=f"{HOST}:1")
        found = await restore([*machines, silent], [copy(4), copy(6)])

    assert [one.rank for one in found.moved] == [4]
    assert found.unreachable == ["m3"]


async def test_a_second_attempt_of_the_activity_brings_nothing_twice() -> None:
    agents = keepers()
    async with serving(agents) as machines:
        first = await restore(machines, [copy(4), copy(5)])
        again = await restore(machines, [copy(4), copy(5)])

    assert len(agents[2].asked) == 1
    assert again.moved == first.moved


def remote(ranks: Sequence[int]) -> list[CopyToRestore]:
    return [copy(rank, Tier.REMOTE, SPEC_MACHINES[rank // 2]) for rank in ranks]


SPEC_MACHINES = ["m0", "m1", "m2", "m3"]
SAME = {"digests": {rank: f"shard-{rank // 4}-{rank % 2}" for rank in range(8)}}


async def test_one_rank_of_a_dp_group_reads_remote_storage_for_the_others() -> None:
    agents = keepers()
    async with serving(agents) as machines:
        found = await restore(machines, remote(range(8)), **SAME)

    assert len(found.moved) == 8
    by_rank = {shard.rank: shard for agent in agents for shard in agent.shards}
    assert [rank for rank, shard in sorted(by_rank.items()) if not shard.HasField("tensors_rank")] == [0, 1, 4, 5]
    assert (by_rank[6].tensors_rank, by_rank[6].tensors_address) == (4, machines[2].address)


async def test_ranks_whose_reader_failed_read_for_themselves() -> None:
    def no_reader(shard: pb.ShardSource) -> pb.ShardRestored:
        if shard.rank == 4:
            return pb.ShardRestored(rank=4, damaged=True, reason="truncated")
        return there(shard)

    def no_follower(shard: pb.ShardSource) -> pb.ShardRestored:
        if shard.HasField("tensors_rank"):
            return pb.ShardRestored(rank=shard.rank, damaged=True, reason="other tensors than m2's")
        return there(shard)

    agents = keepers(no_reader, no_follower)
    async with serving(agents) as machines:
        found = await restore(machines, remote([4, 5, 6, 7]), **SAME)

    assert [one.rank for one in found.moved] == [5, 6, 7]
    assert [one.rank for one in found.failed] == [4]
    direct = [shard.rank for shard in agents[3].shards if not shard.HasField("tensors_rank")]
    assert sorted(direct) == [6, 7]
