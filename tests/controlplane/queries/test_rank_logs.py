"""Logs are read through a real gRPC server from real files, even if the server is away for a while."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agent.client import AgentClients
from agent.fake import FakeAgent
from agent.reporting import rank_logs
from agent.state.reads import Reads
from agent.v1 import agent_pb2 as pb
from controlplane.queries.rank_logs import LineCutter, RankLogs, Source, after, last_lines, sources_of
from everstep.errors import AgentError, ConfigError, UnknownJob
from everstep.model.job import JobSpec
from everstep.model.machine import Machine


async def serve(folder: Path) -> tuple[FakeAgent, Source]:
    """Start an agent that serves files ``<rank>.out`` and ``<rank>.err``. Returns it, and the log source of rank 0."""

    def read_log(request: pb.ReadLogRequest) -> AsyncIterator[pb.LogChunk]:
        suffix = {pb.ReadLogRequest.STDOUT: "out", pb.ReadLogRequest.STDERR: "err"}[request.stream]
        path = folder / f"{request.rank}.{suffix}"
        if not path.exists() and not request.follow:
            raise UnknownJob("no log")
        return rank_logs.read_log({request.stream: path}, request.tail_bytes, request.follow, Reads())

    agent = FakeAgent(read_log=read_log)
    await agent.start()
    return agent, Source(0, Machine(name="m0", address=agent.address))


@pytest.fixture
async def agents() -> AsyncIterator[AgentClients]:
    pool = AgentClients()
    yield pool
    await pool.close()


async def test_all_or_the_last_lines_of_each_stream(tmp_path: Path, agents: AgentClients) -> None:
    (tmp_path / "0.out").write_text("".join(f"step {i} {'x' * 300}\n" for i in range(40)))
    (tmp_path / "0.err").write_text("warning\nno end of line")
    agent, source = await serve(tmp_path)
    reader = RankLogs(agents, "gpt")
    assert len(await reader.read(source)) == 42
    last = await reader.read(source, tail=3)
    assert [line.split(" x")[0] for line in last] == ["step 37", "step 38", "step 39", "warning", "no end of line"]
    assert await RankLogs(agents, "gpt", "stderr").read(source, tail=1) == ["no end of line"]
    with pytest.raises(AgentError):
        await reader.read(Source(1, source.machine))
    await agent.stop()


async def test_following_goes_on_where_it_was_when_the_agent_comes_back(tmp_path: Path, agents: AgentClients) -> None:
    log = tmp_path / "0.out"
    log.write_text("one\ntwo\n")
    agent, source = await serve(tmp_path)
    over = asyncio.Event()
    found = RankLogs(agents, "gpt", "stdout").follow([source], tail=1, over=over)
    assert await anext(found) == (0, "two")
    with log.open("a") as file:
        file.write("three\nfo")
    assert await anext(found) == (0, "three")
    await agent.stop()
    with log.open("a") as file:
        file.write("ur\nfive\n")
    await agent.start()
    assert [await anext(found), await anext(found)] == [(0, "four"), (0, "five")]
    over.set()
    assert [line async for line in found] == []
    await agent.stop()


def test_lines_and_characters_in_pieces() -> None:
    """Pieces may end within a line or within a character."""
    cutter = LineCutter()
    assert cutter.take("Kö".encode()[:2]) == []
    assert cutter.take("Kö".encode()[2:] + b"ln\r\nab") == ["Köln"]
    assert cutter.end() == ["ab"]
    assert cutter.end() == []


def test_the_place_is_found_again() -> None:
    """Reading continues behind the last line that was read."""
    assert after(b"two\n", b"one\ntwo\nthree\n") == b"three\n"
    assert after(b"gone\n", b"other\n") == b"other\n"
    assert after(b"", b"all\n") == b"all\n"
    assert last_lines(b"a\nb\nc", 2) == b"b\nc"
    assert last_lines(b"a\nb\n", 0) == b""


def test_a_rank_lies_on_its_machine() -> None:
    spec = JobSpec(name="gpt", script="/srv/train.py", machines=2, ranks_per_machine=2)
    machines = [Machine(name=f"m{i}", address=f"127.0.0.1:{i}") for i in range(2)]
    assert [(s.rank, s.machine.name) for s in sources_of(spec, machines)] == [
        (0, "m0"),
        (1, "m0"),
        (2, "m1"),
        (3, "m1"),
    ]
    with pytest.raises(ConfigError, match="from 0 to 3"):
        sources_of(spec, machines, 4)
