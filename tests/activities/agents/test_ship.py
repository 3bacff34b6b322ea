"""Workers send snapshots of code to machines that lack them."""

from __future__ import annotations

import asyncio
import os
import tempfile
import tracemalloc
from collections.abc import AsyncIterable
from pathlib import Path
from typing import BinaryIO, cast

import pytest
from temporalio.exceptions import ApplicationError

from activities.agents import ship
from activities.agents.launch_ranks import LaunchRanks
from activities.agents.prepare_machines import PrepareMachines
from activities.agents.ship import Shipment
from activities.versions.snapshot import folder_snapshot
from activities.versions.store import StoredCode, VersionStore
from agent.client import AgentClient, AgentClients
from agent.fake import NEVER, FakeAgent
from agent.v1 import agent_pb2 as pb
from everstep.errors import AgentError, AgentUnreachable, CodeMissing, VersionStoreError
from everstep.model.job import JobSpec, PlacedJob
from everstep.model.machine import Machine
from everstep.model.version import CodeVersion
from tests.activities.performing import perform
from tests.activities.spoken import reached
from tests.agent.agents import running_agent


class Kept:
    """A store with one snapshot."""

    def __init__(self, folder: Path, text: str = "print(1)\n") -> None:
        self.store = VersionStore(str(folder / "versions"))
        (folder / "code").mkdir()
        (folder / "code/job.py").write_text(text)
        with folder_snapshot(folder / "code") as taken:
            self.digest, self.bytes = taken.digest, taken.archive_bytes
            version = CodeVersion(code=taken.digest, script="job.py")
            asyncio.run(self.store.put("gpt", version, taken))
            taken.archive.seek(0)
            self.archive = taken.archive.read()


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    return Kept(tmp_path)


def lacking() -> FakeAgent:
    """Return an agent that has no code and accepts code."""
    return FakeAgent(has_code=pb.HasCodeReply(), put_code=pb.PutCodeReply())


async def shipped(kept: Kept, agents: list[FakeAgent]) -> Shipment:
    """Bring the snapshot to all agents."""
    say = list[str]().append
    async with reached(agents) as (pool, machines), Shipment(kept.store, kept.digest, say) as shipment:
        await asyncio.gather(*(shipment.supply(pool.get(machine.address)) for machine in machines))
        return shipment


async def test_those_that_lack_it_get_it_and_the_store_is_read_once(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[str] = []
    read = kept.store.code
    has = FakeAgent(has_code=pb.HasCodeReply(digests=[kept.digest]))
    agents, said = [lacking(), has, lacking()], list[str]()
    shipment = Shipment(kept.store, kept.digest, said.append)

    async def counted(digest: str) -> StoredCode:
        reads.append(digest)
        # Wait until both agents have said that they lack the code. Otherwise one agent may have received it before the
        # other one says so.
        while shipment.wanted < 2:  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.01)
        return await read(digest)

    monkeypatch.setattr(kept.store, "code", counted)
    async with reached(agents) as (pool, machines), shipment:
        await asyncio.gather(*(shipment.supply(pool.get(machine.address)) for machine in machines))
    assert (shipment.brought, shipment.wanted) == (2, 2)
    assert reads == [kept.digest]
    assert has.asked("put_code") == []
    for agent in (agents[0], agents[2]):
        [chunks] = agent.asked("put_code")
        assert (chunks[0].digest, chunks[0].bytes) == (kept.digest, kept.bytes)
        assert b"".join(chunk.data for chunk in chunks) == kept.archive
    assert said == ["1 of 2 machines have received the code, 0.0 MB", ""]


async def test_a_store_is_not_asked_where_nobody_lacks_it(kept: Kept) -> None:
    async with reached([FakeAgent(has_code=pb.HasCodeReply(digests=[kept.digest]))]) as (pool, machines):
        async with Shipment(None, kept.digest, print) as shipment:
            await shipment.supply(pool.get(machines[0].address))
        async with Shipment(None, "", print) as nothing:  # the job runs in place, so no agent is asked
            await nothing.supply(pool.get("127.0.0.1:1"))


async def test_without_a_store_it_is_told_what_to_do(kept: Kept) -> None:
    async with reached([lacking()]) as (pool, machines), Shipment(None, kept.digest, print) as shipment:
        with pytest.raises(VersionStoreError, match="the same --versions URL"):
            await shipment.supply(pool.get(machines[0].address))


async def test_no_more_machines_than_the_bound_get_it_at_a_time(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ship, "AT_ONCE", 2)
    under_way, most = 0, 0

    async def take(_: object) -> pb.PutCodeReply:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.02)
        under_way -= 1
        return pb.PutCodeReply()

    await shipped(kept, [FakeAgent(has_code=pb.HasCodeReply(), put_code=take) for _ in range(6)])
    assert most == 2


async def test_a_large_archive_goes_piece_by_piece() -> None:
    size = 100_000_000
    file = cast(BinaryIO, tempfile.TemporaryFile())  # noqa: SIM115
    os.truncate(file.fileno(), size)

    class Slow:
        """Receives one piece after the other."""

        async def put_code(self, digest: str, size: int, archive: AsyncIterable[bytes], *, timeout_s: float) -> None:
            assert timeout_s > 60 + size / ship.SLOWEST_BYTES - 1
            async for piece in archive:
                sizes.append(len(piece))
                await asyncio.sleep(0)

    sizes: list[int] = []
    async with Shipment(None, "0" * 64, lambda _: None) as shipment:
        shipment._stored = StoredCode("0" * 64, [], file, size)
        tracemalloc.start()
        await asyncio.gather(*(shipment._bring(cast(AgentClient, Slow())) for _ in range(4)))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert (sum(sizes), max(sizes)) == (4 * size, 1 << 20)
    assert peak < 16 << 20


async def test_a_real_agent_takes_what_is_larger_than_a_message(tmp_path: Path) -> None:
    """The code is random text, which gzip cannot compress below the size of a message."""
    kept = await asyncio.to_thread(Kept, tmp_path, os.urandom(3_000_000).hex())
    async with running_agent(tmp_path / "agent") as agent:
        async with Shipment(kept.store, kept.digest, print) as shipment:
            await shipment.supply(agent.client)
            await shipment.supply(agent.client)
        assert shipment.brought == 1
        assert await agent.client.has_code([kept.digest]) == [kept.digest]


SPEC = JobSpec(name="gpt", script="job.py", version=3)


def launch(spec: JobSpec, machines: list[Machine]) -> LaunchRanks:
    return LaunchRanks(job=PlacedJob(spec=spec, machines=machines), generation=1, resume_step=-1)


def launching(digest: str, **answers: object) -> FakeAgent:
    """An agent that can launch only after it received the code."""
    agent = FakeAgent(
        start_store=pb.StartStoreReply(host="m0", port=1),
        prepare=pb.PrepareReply(seconds=0.5),
        has_code=lambda _: pb.HasCodeReply(digests=[digest] if agent.asked("put_code") else []),
        put_code=pb.PutCodeReply(),
        launch=lambda request: (
            pb.LaunchReply(generation=1) if agent.asked("put_code") else CodeMissing(f"m0 lacks {request.program.code}")
        ),
    )
    agent.answer(**answers)  # type: ignore[arg-type]
    return agent


async def test_a_launch_brings_the_code_to_machines_that_came_without_it(kept: Kept) -> None:
    spec = SPEC.model_copy(update={"code": kept.digest, "machines": 2})
    agents = [launching(kept.digest), launching(kept.digest, launch=pb.LaunchReply(generation=1))]
    async with reached(agents) as (pool, machines):
        await perform(launch(spec, machines), agents=pool, versions=kept.store)
    assert [len(agent.asked("put_code")) for agent in agents] == [1, 0]
    last = agents[0].asked("launch")[-1]
    assert (last.program.code, last.version, last.program.script) == (kept.digest, 3, "job.py")


async def test_a_launch_without_a_store_says_which_machine_lacks_the_code(kept: Kept) -> None:
    spec = SPEC.model_copy(update={"code": kept.digest})
    async with reached([launching(kept.digest)]) as (pool, machines):
        with pytest.raises(ApplicationError, match="m0: this worker has no store of versions"):
            await perform(launch(spec, machines), agents=pool)


async def test_code_comes_while_fork_servers_start(kept: Kept) -> None:
    agent = launching(kept.digest)
    came = asyncio.Event()

    async def prepare(_: object) -> pb.PrepareReply:
        async with asyncio.timeout(30):
            await came.wait()
        return pb.PrepareReply(seconds=0.5)

    def take(_: object) -> pb.PutCodeReply:
        came.set()
        return pb.PutCodeReply()

    agent.answer(prepare=prepare, put_code=take)
    spec = SPEC.model_copy(update={"code": kept.digest})
    async with reached([agent]) as (pool, machines):
        given = PrepareMachines(job=PlacedJob(spec=spec, machines=machines))
        assert await perform(given, agents=pool, versions=kept.store) == 0.5
    assert len(agent.asked("put_code")) == 1


async def test_a_machine_that_dies_half_way_gets_it_when_it_is_back(kept: Kept) -> None:
    agent, pool, begun = lacking(), AgentClients(), asyncio.Event()

    def begins(_: object) -> object:
        begun.set()
        return NEVER

    agent.answer(put_code=begins)
    await agent.start()
    async with Shipment(kept.store, kept.digest, print) as shipment:
        half = asyncio.create_task(shipment.supply(pool.get(agent.address)))
        await begun.wait()
        await agent.stop()
        with pytest.raises(AgentUnreachable):
            await half
        assert (shipment.brought, shipment.wanted) == (0, 0)
        agent.answer(put_code=pb.PutCodeReply())
        await agent.start()
        async with asyncio.timeout(30):
            while shipment.brought == 0:
                try:
                    await shipment.supply(pool.get(agent.address))
                except AgentUnreachable:
                    await asyncio.sleep(0.05)
    await pool.close()
    await agent.stop()
    assert b"".join(chunk.data for chunk in agent.asked("put_code")[-1]) == kept.archive


async def test_a_machine_without_room_says_so(kept: Kept) -> None:
    agent = FakeAgent(has_code=pb.HasCodeReply(), put_code=AgentError("m0 cannot keep the code: No space left"))
    with pytest.raises(AgentError, match="No space left"):
        await shipped(kept, [agent])
