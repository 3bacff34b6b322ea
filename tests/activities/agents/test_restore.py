"""The restore of copies. Failures are named, and the activity stops waiting when waiting cannot help any more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from activities.agents.restore_checkpoints import RestoreCheckpoints
from agent.client import AgentClients
from agent.fake import FakeAgent
from agent.v1 import agent_pb2 as pb
from everstep.model.job import JobSpec
from everstep.model.machine import Machine
from everstep.model.places import Places
from everstep.model.ranks import Ranks
from everstep.model.state_copy import Restored, StateCopies, Tier
from tests.activities.performing import perform
from tests.activities.spoken import HOST, serving
from tests.state_copies import named

Answer = Callable[[pb.ShardSource], pb.ShardRestored]


def there(shard: pb.ShardSource) -> pb.ShardRestored:
    return pb.ShardRestored(rank=shard.rank, ok=True, bytes=100)


def keepers(*answers: Answer) -> list[FakeAgent]:
    """Return four agents. The last of them answer each shard with these answers, and the others have every copy."""

    def keeper(answer: Answer) -> FakeAgent:
        return FakeAgent(restore=lambda request: pb.RestoreReply(shards=map(answer, request.shards)))

    return [keeper(answer) for answer in [*[there] * (4 - len(answers)), *answers]]


def shards_of(*agents: FakeAgent) -> list[pb.ShardSource]:
    return [shard for agent in agents for request in agent.asked("restore") for shard in request.shards]


SPEC = JobSpec(name="job", script="/job.py", machines=4, ranks_per_machine=2, tp=2, pp=2)
"""A job with the data-parallel groups 0 2, 1 3, 4 6 and 5 7."""


def copy(rank: int, tier: Tier = Tier.BACKUP, machine: str = "m0") -> StateCopies:
    return StateCopies.one(rank=rank, completed_steps=20, tier=tier, machine=machine)


async def restore(machines: Sequence[Machine], copies: Sequence[StateCopies], **more: Any) -> Restored:
    pool = AgentClients()
    patience = {"patience_s": 0.3, "reach_s": 0.0} | more
    given = RestoreCheckpoints.model_validate(
        {"job": {"spec": SPEC, "machines": list(machines)}, "copies": list(copies)} | patience
    )
    try:
        return await asyncio.wait_for(perform(given, agents=pool), 60)
    finally:
        await pool.close()


async def test_each_machine_is_told_once_where_its_copies_are() -> None:
    agents = keepers()
    async with serving(agents) as machines:
        found = await restore(machines, [copy(4), copy(5), copy(6, Tier.DISK, "m3"), copy(7, machine="m1")])

    assert [len(agent.asked("restore")) for agent in agents] == [0, 0, 1, 1]
    assert [(one.rank, one.tier, one.machine, one.address) for one in shards_of(agents[2])] == [
        (4, pb.HeldCheckpoint.BACKUP, "m0", machines[0].address),
        (5, pb.HeldCheckpoint.BACKUP, "m0", machines[0].address),
    ]
    [at_home, elsewhere] = shards_of(agents[3])
    assert (at_home.address, elsewhere.address) == ("", machines[1].address)
    assert agents[2].asked("restore")[0].checkpoint.slots == SPEC.checkpoint.slots
    assert [one.ranks.first for one in found.moved] == [4, 5, 6, 7]
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

    assert [one.ranks.first for one in found.moved] == [5]
    reason = "the payload's checksum does not hold"
    assert found.failed == [
        StateCopies.one(rank=4, machine="m0", completed_steps=20, tier=Tier.BACKUP, valid=False, reason=reason)
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

    assert [one.ranks.first for one in found.moved] == [4, 5]
    assert tried.count(5) == 1, "a copy that was restored is not fetched again"


async def test_a_copy_that_stays_out_of_reach_is_not_called_damaged() -> None:
    def away(shard: pb.ShardSource) -> pb.ShardRestored:
        return pb.ShardRestored(rank=shard.rank, reason="m0 is away")

    async with serving(keepers(away, there)) as machines:
        found = await restore(machines, [copy(4)])

    assert not found.failed
    assert [(one.ranks.first, one.reason, one.valid) for one in found.unreached] == [(4, "m0 is away", False)]


async def test_a_machine_that_stays_silent_is_named_and_holds_up_no_other() -> None:
    async with serving(keepers()[:3]) as machines:
        silent = Machine(name="m3", address=f"{HOST}:1")
        found = await restore([*machines, silent], [copy(4), copy(6)])

    assert [one.ranks.first for one in found.moved] == [4]
    assert found.unreachable == ["m3"]


async def test_a_second_attempt_of_the_activity_brings_nothing_twice() -> None:
    brought: list[int] = []

    def bring(shard: pb.ShardSource) -> pb.ShardRestored:
        brought.append(shard.rank)
        return there(shard)

    async with serving(keepers(bring, bring)) as machines:
        first = await restore(machines, [copy(4), copy(5)])
        again = await restore(machines, [copy(4), copy(5)])

    assert brought == [4, 5]
    assert again.moved == first.moved


def remote(ranks: Sequence[int]) -> list[StateCopies]:
    """Return remote copies of all ranks; the ranks of each data-parallel group have equal tensors."""
    everyone = copy(0, Tier.REMOTE).changed(
        places=Places({machine: f"{2 * index}-{2 * index + 1}" for index, machine in enumerate(SPEC_MACHINES)}),
        alike=Ranks.of(range(8)),
    )
    return [everyone.among(Ranks.of(ranks))]


SPEC_MACHINES = ["m0", "m1", "m2", "m3"]


async def test_one_rank_of_a_dp_group_reads_remote_storage_for_the_others() -> None:
    agents = keepers()
    async with serving(agents) as machines:
        found = await restore(machines, remote(range(8)))

    assert len(named(found.moved)) == 8
    by_rank = {shard.rank: shard for shard in shards_of(*agents)}
    assert [by_rank[rank].local_rank for rank in range(8)] == [0, 1] * 4, "it decides the network card"
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
        found = await restore(machines, remote([4, 5, 6, 7]))

    assert [rank for rank, _ in named(found.moved)] == [5, 6, 7]
    assert [one.ranks.first for one in found.failed] == [4]
    direct = [shard.rank for shard in shards_of(agents[3]) if not shard.HasField("tensors_rank")]
    assert sorted(direct) == [6, 7]
