"""The cache of snapshots: which snapshots are kept, and what happens if the disk is full or a sender becomes silent."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agent.code import cache
from agent.code.cache import CodeCache
from agent.state.reads import Reads
from agent.v1 import agent_pb2 as pb
from everstep.errors import AgentError, ConfigError
from everstep.system.code_archive import digest_of
from tests.agent.code.snapshots import packed

pytestmark = pytest.mark.asyncio


@pytest.fixture(params=[0, cache.IN_MEMORY], ids=["through a file", "in memory"])
def code(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> CodeCache:
    monkeypatch.setattr(cache, "IN_MEMORY", request.param)
    return CodeCache(tmp_path / "code", Reads(), "m1")


async def sent(archive: bytes, digest: str) -> AsyncIterator[pb.CodeChunk]:
    yield pb.CodeChunk(digest=digest, bytes=len(archive))
    yield pb.CodeChunk(data=archive)


async def put(code: CodeCache, number: int, text: str = "") -> str:
    archive, digest = packed({"main.py": f"{number}\n", "more.txt": text})
    await code.put(sent(archive, digest))
    return digest


def used_at(code: CodeCache, digest: str, when: int) -> None:
    os.utime(code.folder / f"{digest}.json", ns=(when, when))


async def test_what_is_pinned_stays_however_long_it_was_not_used(
    code: CodeCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "KEPT", 1)
    old = await put(code, 0)
    used_at(code, old, 1)
    with code.kept(old):
        await put(code, 1)
        assert await code.has([old]) == [old]
    used_at(code, old, 1)
    await put(code, 2)
    assert await code.has([old]) == []


async def test_the_ones_used_longest_ago_go_but_none_that_a_job_runs(
    code: CodeCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "KEPT", 3)
    digests = [await put(code, number) for number in range(3)]
    for when, digest in enumerate(digests, 1):
        used_at(code, digest, when)
    code.in_use = lambda: {digests[0]}

    digests.append(await put(code, 3))
    assert await code.has(digests) == [digests[0], digests[2], digests[3]]
    used_at(code, digests[2], 1)
    assert await code.has([digests[2]]), "a query counts as a use"
    used_at(code, digests[3], 2)
    digests.append(await put(code, 4))
    assert await code.has(digests) == [digests[0], digests[2], digests[4]]
    assert sorted(path.name for path in code.folder.iterdir()) == sorted(
        name for digest in await code.has(digests) for name in (digest, f"{digest}.json")
    )


async def test_bytes_are_bounded_too_and_what_just_came_stays(code: CodeCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "KEPT_BYTES", 1500)
    digests = [await put(code, number, "x" * 1000) for number in range(2)]
    assert await code.has(digests) == [digests[1]]
    assert (code.snapshots, code.bytes) == (1, 1002)
    with code.kept(digests[1]):
        digests.append(await put(code, 2, "y" * 2000))
        assert await code.has(digests) == digests[1:]


async def test_a_full_disk_is_named_and_harms_nothing_else(code: CodeCache, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = await put(code, 1)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched, pytest.raises(AgentError, match="m1 cannot keep the code: No space left"):
        patched.setattr(cache, "unpack", full)
        await put(code, 2)
    assert [path.name for path in code.folder.iterdir() if path.name.startswith(".")] == []
    assert await code.has([kept]) == [kept]
    assert await code.has([await put(code, 2)])


async def test_whoever_falls_silent_is_left(code: CodeCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "CHUNK_PATIENCE_S", 0.1)
    archive, digest = packed({"main.py": ""})

    async def half() -> AsyncIterator[pb.CodeChunk]:
        yield pb.CodeChunk(digest=digest, bytes=len(archive))
        await asyncio.Event().wait()

    with pytest.raises(AgentError, match="no further chunk"):
        await code.put(half())
    assert list(code.folder.glob("*")) == []


async def test_an_empty_snapshot_is_one_too(code: CodeCache) -> None:
    archive, digest = packed({})
    assert digest == digest_of([])
    await code.put(sent(archive, digest))
    assert await code.has([digest]) == [digest]
    with pytest.raises(ConfigError, match=r"main\.py is not in the code"):
        await code.script(digest, "main.py", verified=True)
