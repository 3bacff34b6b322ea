"""Snapshots of code are sent to a real agent. Ranks start from them. Damaged or incomplete snapshots are refused."""

from __future__ import annotations

import asyncio
import io
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agent.code.cache import COMING, IN_MEMORY
from agent.v1 import agent_pb2 as pb
from everstep.errors import AgentError, AgentUnreachable, CodeMissing, ConfigError
from everstep.system.code_archive import Packer, digest_of
from tests.agent.agents import Job, RunningAgent, prepared, running_agent, until
from tests.agent.code.snapshots import folder, packed, pieces, put

pytestmark = pytest.mark.asyncio(loop_scope="module")


def request(job: Job, code: str, script: str, generation: int = 1, version: int = 7) -> pb.LaunchRequest:
    made = job.launch_request(generation)
    made.program.code, made.program.script, made.version = code, script, version
    return made


FILES = {
    "train/main.py": "import os, sys, pathlib\nfrom lib import WORD\n"
    "print(WORD, os.environ['EVERSTEP_VERSION'], sys.argv[0] == __file__, pathlib.Path.cwd())\n",
    "train/lib.py": "WORD = 'one'\n",
}


async def test_a_script_runs_from_the_sent_snapshot_and_knows_its_version(agent: RunningAgent) -> None:
    job = await prepared(agent, "")
    archive, digest = packed(FILES)

    assert await agent.client.has_code([digest, "0" * 64, "../x"]) == []
    first, second = [await agent.client.put_code(digest, len(archive), pieces(archive)) for _ in range(2)]
    assert (first.reused, first.bytes) == (False, sum(map(len, FILES.values())))
    assert second.reused
    assert await agent.client.has_code([digest, "0" * 64]) == [digest]

    await agent.client.launch(request(job, digest, "train/main.py"))
    assert all(seen.rank_ended.exit.value == 0 for seen in await job.exits(2))
    assert await job.log(1, 1) == f"one 7 True {folder(agent) / digest / 'train'}\n".encode()
    await job.release()


async def test_each_generation_runs_the_code_of_its_own_snapshot(agent: RunningAgent) -> None:
    job = await prepared(agent, "", ranks=1)
    one = await put(agent, FILES)
    other = await put(agent, FILES | {"train/lib.py": "WORD = 'two'\n"})

    for generation, code in enumerate((one, other, one), 1):
        await agent.client.launch(request(job, code, "train/main.py", generation, version=generation))
        await job.exits(generation)
        await job.stop(generation)
    said = (await job.log(0, 1)).decode().splitlines()
    assert [line.split()[:2] for line in said] == [["one", "1"], ["two", "2"], ["one", "3"]]
    await job.release()


async def test_missing_code_is_named_and_can_be_sent(agent: RunningAgent) -> None:
    job = await prepared(agent, "", ranks=1)
    files = FILES | {"train/other.py": "1\n"}
    _, digest = packed(files)

    with pytest.raises(CodeMissing, match=digest[:12]):
        await agent.client.launch(request(job, digest, "train/main.py"))
    await put(agent, files)
    for script, said in (("no.py", "not in the code"), ("../main.py", "not a path"), ("/etc/x", "not a path")):
        with pytest.raises(ConfigError, match=said):
            await agent.client.launch(request(job, digest, script))
    await agent.client.launch(request(job, digest, "train/main.py"))
    await job.release()


@pytest.mark.parametrize("harm", ["change", "remove", "index", "folder"])
async def test_damaged_code_counts_as_missing_and_can_be_sent_again(agent: RunningAgent, harm: str) -> None:
    files = FILES | {"harm.txt": harm}
    digest = await put(agent, files)
    file = folder(agent) / digest / "train/lib.py"
    if harm == "change":
        file.chmod(0o600)
        file.write_text("WORD = 'six'\n")
    elif harm == "remove":
        file.unlink()
    elif harm == "index":
        (folder(agent) / f"{digest}.json").write_text("{")
    else:
        (folder(agent) / digest).rename(agent.folder / f"moved-{digest}")

    assert await agent.client.has_code([digest]) == []
    await put(agent, files)
    assert await agent.client.has_code([digest]) == [digest]
    assert file.read_text() == FILES["train/lib.py"]


async def test_code_that_differs_from_the_announcement_is_refused_and_leaves_nothing(agent: RunningAgent) -> None:
    archive, digest = packed(FILES | {"here.txt": ""})
    for announced, size, data, said in [
        ("../" + digest[3:], len(archive), archive, "digest"),
        (digest, 0, archive, "0 bytes"),
        (digest, 1 << 40, archive, "the limit is"),
        (digest, len(archive) + 1, archive, "not the announced"),
        (digest, len(archive) - 1, archive, "not the announced"),
        (digest, len(archive), archive[:-9] + bytes(9), "not a complete archive"),
        ("0" * 64, len(archive), archive, "and not 0000"),
    ]:
        with pytest.raises((AgentError, ConfigError), match=said):
            await agent.client.put_code(announced, size, pieces(data))

    assert not list(folder(agent).glob(".*"))
    assert await agent.client.has_code([digest, "0" * 64]) == []


async def test_simultaneous_transfers_of_a_snapshot_store_it_once(agent: RunningAgent) -> None:
    archive, digest = packed({f"{n}.py": f"{n}\n" * 500 for n in range(50)})
    replies = await asyncio.gather(
        *(agent.client.put_code(digest, len(archive), pieces(archive), timeout_s=30) for _ in range(4))
    )

    assert [reply.reused for reply in replies].count(False) == 1
    assert await agent.client.has_code([digest]) == [digest]
    assert not list(folder(agent).glob(".*"))


async def test_a_kill_during_a_transfer_leaves_no_part_of_the_code(tmp_path: Path) -> None:
    archive, digest = packed(FILES)
    gone = asyncio.Event()

    async def half() -> AsyncIterator[bytes]:
        yield archive[:100]
        await gone.wait()

    async with running_agent(tmp_path) as agent:
        kept = await put(agent, FILES | {"kept.txt": ""})
        coming = asyncio.create_task(agent.client.put_code(digest, len(archive) + IN_MEMORY, half()))
        await until(lambda: bool(list(folder(agent).glob(f"{COMING}*/archive"))), "the archive arrives")
        agent.kill()
        with pytest.raises(AgentUnreachable):
            await coming
        gone.set()
        (folder(agent) / digest).mkdir()  # as if the agent had died while it unpacked the archive
        await agent.start()
        await until(lambda: not list(folder(agent).glob(".*")), "the remains of the transfer are removed")
        assert await agent.client.has_code([digest, kept]) == [kept]
        await put(agent, FILES)
        assert await agent.client.has_code([digest, kept]) == [digest, kept]


async def test_a_restarted_agent_accepts_code_with_links_and_with_any_umask(tmp_path: Path) -> None:
    output = io.BytesIO()
    with Packer(output) as packer:
        held = [packer.add("a/main.py", "f", b"1\n"), packer.add("now", "l", b"a")]
    digest, before = digest_of(held), os.umask(0o002)
    try:
        async with running_agent(tmp_path / "agent") as agent:
            await agent.client.put_code(digest, len(output.getvalue()), pieces(output.getvalue()))
            (folder(agent) / digest / "a/__pycache__").mkdir()
            agent.kill()
            await agent.start()
            assert await agent.client.has_code([digest]) == [digest]
    finally:
        os.umask(before)
