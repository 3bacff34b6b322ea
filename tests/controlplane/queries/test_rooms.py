"""The machine with the least free memory decides what fits. The agents are fakes."""

from __future__ import annotations

import pytest

from agent.client import AgentClients
from agent.fake import FakeAgent
from agent.v1 import agent_pb2 as pb
from controlplane.queries import rooms
from everstep.errors import AgentUnreachable, ClusterError
from everstep.model.machine import Machine

GB = 10**9


def free(shm: int, memory: int) -> pb.DescribeReply:
    return pb.DescribeReply(room=pb.Room(shm_free=shm * GB, memory_available=memory * GB))


async def asked(*replies: pb.DescribeReply | Exception) -> tuple[dict[str, float], str]:
    agents = [FakeAgent(f"m{index}", describe=reply) for index, reply in enumerate(replies)]
    pool = AgentClients()
    try:
        for agent in agents:
            await agent.start()
        return await rooms.smallest_room(pool, [Machine(name=agent.machine, address=agent.address) for agent in agents])
    finally:
        await pool.close()
        for agent in agents:
            await agent.stop()


async def test_the_least_of_each_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rooms, "_host", lambda machine: machine.name)
    least, source = await asked(free(100, 300), free(200, 250))

    assert least == {"shm_gb": 100, "memory_gb": 250}
    assert source == "free on the smallest machine of the cluster"


async def test_machines_of_one_computer_share_its_memory() -> None:
    least, _ = await asked(free(100, 300), free(100, 300))
    assert least == {"shm_gb": 50, "memory_gb": 150}


async def test_a_machine_without_an_answer_is_named() -> None:
    least, source = await asked(free(100, 300), AgentUnreachable("it is away"), pb.DescribeReply())

    assert least == {"shm_gb": pytest.approx(100 / 3), "memory_gb": 100}
    assert source.endswith(", without an answer of m1, m2")
    with pytest.raises(ClusterError, match="none of 1 machines answers"):
        await asked(AgentUnreachable("it is away"))
