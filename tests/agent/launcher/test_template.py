"""Fork servers that a template forks are like fork servers that an agent starts."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import pytest_asyncio

from agent.launcher.fork_client import ForkServerClient
from agent.launcher.from_template import end_of, fork_from
from agent.v1 import agent_pb2 as pb
from tests import templates
from tests.agent.agents import Job, RunningAgent, alive, running_agent, until
from tests.strangers import python_as_nobody
from tests.templates import Template

SLEEP = "import time; time.sleep(600)\n"


class Served(NamedTuple):
    """A template that serves requests."""

    socket: Path
    pid: int


@pytest.fixture
def own() -> Iterator[Template]:
    """A template that only this test uses, so the test may harm it."""
    template = Template()
    yield template
    template.close()


@pytest.fixture
def template(request: pytest.FixtureRequest) -> Served:
    """The template that all tests share, or with the mark ``own_template`` the test's own template."""
    if not request.node.get_closest_marker("own_template"):
        return Served(templates.shared(), templates.shared_pid())
    own: Template = request.getfixturevalue("own")
    return Served(own.socket, own.process.pid)


@pytest_asyncio.fixture(loop_scope="function")
async def agent(tmp_path: Path, template: Served) -> AsyncIterator[RunningAgent]:
    async with running_agent(tmp_path, "--template", str(template.socket), alone=True) as running:
        yield running


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def looks(pid: int) -> dict[str, object]:
    """Return what other processes see of a process, without facts that differ between any two processes."""
    status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    arguments = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    files = {path.name: str(path.readlink()) for path in Path(f"/proc/{pid}/fd").iterdir()}
    return {
        "arguments": [one for one in arguments if one.startswith(b"-") and one != b"--socket-fd"],
        "program": arguments[2],
        "session": os.getsid(pid) == pid == os.getpgid(pid),
        "folder": str(Path(f"/proc/{pid}/cwd").readlink()),
        "signals": [status[name] for name in ("SigBlk", "SigIgn", "SigCgt", "Threads")],
        "input": files["0"],
        "prints to": {Path(files[number]).suffix for number in ("1", "2")},
        "files": sorted(name.partition(":")[0] for name in files.values() if not name.endswith(".log")),
    }


def names(pid: int, folder: Path) -> bool:
    return os.fsencode(folder) in Path(f"/proc/{pid}/cmdline").read_bytes()


async def test_it_looks_like_one_that_an_agent_started(agent: RunningAgent, template: Served, tmp_path: Path) -> None:
    async with running_agent(tmp_path / "alone", alone=True) as other:
        forked = (await Job(agent, SLEEP).prepare()).fork_server_pid
        started = (await Job(other, SLEEP).prepare()).fork_server_pid

        assert parent(forked) == template.pid
        assert parent(started) != template.pid
        assert looks(forked) == looks(started)
        assert names(forked, agent.fork_servers)


async def test_its_ranks_see_the_environment_of_their_own_agent(
    monkeypatch: pytest.MonkeyPatch, template: Served, tmp_path: Path
) -> None:
    monkeypatch.setenv("SEEN_BY_THE_AGENT", "yes")
    async with running_agent(tmp_path, "--template", str(template.socket), alone=True) as agent:
        job = Job(agent, "import os; print(os.environ.get('SEEN_BY_THE_AGENT'), os.environ.get('MACHINE'))\n", ranks=1)
        assert parent((await job.prepare()).fork_server_pid) == template.pid
        await job.launch()
        await job.exits(1)

        assert b"yes None" in await job.log(0)


async def test_what_would_have_been_read_by_the_imports_is_started_by_the_agent(
    monkeypatch: pytest.MonkeyPatch, template: Served, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_MAX_AUTOTUNE", "1")
    async with running_agent(tmp_path, "--template", str(template.socket), alone=True) as agent:
        job = Job(agent, "import torch._inductor.config as config; print(config.max_autotune)\n", ranks=1)
        assert parent((await job.prepare()).fork_server_pid) != template.pid
        await job.launch()
        await job.exits(1)

        assert b"True" in await job.log(0)
        assert "TORCHINDUCTOR_MAX_AUTOTUNE" in (agent.folder / "agent.log").read_text()


async def test_one_that_is_killed_is_replaced_and_its_ranks_live_on(agent: RunningAgent, template: Served) -> None:
    job = Job(agent, SLEEP)
    first = (await job.prepare()).fork_server_pid
    ranks = [rank.pid for rank in (await job.launch()).ranks]
    await job.entered()  # a rank without a report could not be found again, so it would end with its server
    os.kill(first, signal.SIGKILL)
    await until(lambda: not alive(first), "the template has collected the killed fork server")
    [died] = await job.observe(1, "fork_server_died")
    assert (died.fork_server_died.exit.kind, died.fork_server_died.exit.value) == (pb.Exit.SIGNAL, signal.SIGKILL)

    while (second := (await agent.client.describe()).jobs[0].fork_server_pid) in (0, first):  # noqa: ASYNC110 - there is no event
        await asyncio.sleep(0.02)
    assert parent(second) == template.pid
    assert await end_of(template.socket, first, 1) is None, (
        "the start time differs, so this pid belonged to another process"
    )
    assert [parent(rank) for rank in ranks] == [template.pid] * 2
    os.kill(ranks[1], signal.SIGTERM)
    [ended] = await job.exits(1)
    told = ended.rank_ended
    assert (told.rank, told.exit.kind, told.exit.value) == (1, pb.Exit.SIGNAL, signal.SIGTERM)
    await job.stop()
    await until(lambda: not any(map(alive, ranks)), "the template has collected the ranks")


@pytest.mark.own_template
async def test_what_was_forked_outlives_the_template_and_agents_go_on_without(
    agent: RunningAgent, own: Template
) -> None:
    job, other = Job(agent, SLEEP), Job(agent, SLEEP)
    server = (await job.prepare()).fork_server_pid
    ranks = [rank.pid for rank in (await job.launch()).ranks]
    own.process.kill()
    own.process.wait()
    agent.kill()
    await agent.start()

    assert all(map(alive, [server, *ranks]))
    assert [one.fork_server_pid for one in (await agent.client.describe()).jobs] == [server]
    assert alive((await other.prepare()).fork_server_pid)
    assert "without the template" in (agent.folder / "agent.log").read_text()


@pytest.mark.own_template
async def test_an_agent_that_dies_while_the_template_imports_leaves_nothing(template: Served, tmp_path: Path) -> None:
    os.kill(template.pid, signal.SIGSTOP)
    async with running_agent(tmp_path, "--template", str(template.socket), "--prewarm", alone=True) as agent:
        await until(lambda: bool(list(agent.fork_servers.glob("*.sock"))), "the agent has asked for a fork server")
        agent.kill()
        os.kill(template.pid, signal.SIGCONT)
        await agent.start()

        job = Job(agent, SLEEP)
        server = (await job.prepare()).fork_server_pid
        await job.launch()
        await job.release()
        children = Path(f"/proc/{template.pid}/task/{template.pid}/children")
        await until(lambda: len(children.read_text().split()) <= 1, "one warm fork server is enough")
        assert alive(server)


@pytest.mark.own_template
async def test_it_ends_when_its_socket_is_removed_and_what_it_forked_does_not(
    agent: RunningAgent, own: Template
) -> None:
    job = Job(agent, SLEEP)
    server = (await job.prepare()).fork_server_pid
    own.socket.unlink()

    assert await asyncio.to_thread(own.process.wait, 30) == 0
    await job.launch()
    assert alive(server)


async def test_it_serves_its_own_user_only(template: Served) -> None:
    program = (
        "with socket.socket(socket.AF_UNIX) as one:\n"
        "    one.connect(sys.argv[1])\n"
        "    one.settimeout(20)\n"
        "    try:\n"
        '        one.sendall(b\'{"arguments": [], "env": {}}\\n\')\n'
        "        print(one.recv(4096))\n"
        "    except (BrokenPipeError, ConnectionResetError):\n"
        "        print(b'')\n"
    )
    await until(template.socket.exists, "the template listens")
    assert template.socket.stat().st_mode & 0o777 == 0o600
    template.socket.chmod(0o666)
    template.socket.parent.chmod(0o755)
    try:
        done = await asyncio.to_thread(python_as_nobody, "import socket, sys", program, str(template.socket))
    finally:
        template.socket.parent.chmod(0o700)
        template.socket.chmod(0o600)

    assert done.stdout == "b''\n", done.stderr


async def test_a_request_that_makes_no_sense_harms_no_other_one(template: Served, tmp_path: Path) -> None:
    await until(template.socket.exists, "the template listens")
    with (tmp_path / "log").open("wb") as log, (tmp_path / "other").open("wb") as other:
        files = (log.fileno(), other.fileno())
        assert await fork_from(template.socket, ["--label", "x" * 5000], dict(os.environ), files) == 0
        assert await fork_from(template.socket, [], {}, files[:1]) == 0
        pid = await fork_from(template.socket, ["--nonsense"], dict(os.environ), files)
        assert pid
        await until(lambda: not alive(pid), "the fork server ends because of an unknown argument")
    assert "--socket-path" in (tmp_path / "other").read_text()
    assert alive(template.pid)


async def test_one_that_dies_before_it_answers_leaves_no_second_server_on_a_socket(tmp_path: Path) -> None:
    """The template may have forked a fork server before it died.

    So the agent starts one with another socket, and removes the first socket.
    """
    asked: list[list[str]] = []

    async def die(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(json.loads(await reader.readline())["arguments"])
        writer.close()

    async with await asyncio.start_unix_server(die, tmp_path / "dying.sock"):
        server = await ForkServerClient.start(tmp_path / "servers", "", {}, tmp_path / "dying.sock")
        try:
            wanted = Path(asked[0][asked[0].index("--socket-path") + 1])
            assert (server.path != wanted, server.path.exists(), wanted.exists()) == (True, True, False)  # noqa: ASYNC240
        finally:
            await server.end()


async def test_without_a_template_an_agent_waits_for_a_moment_and_starts_its_own(tmp_path: Path) -> None:
    folder = tmp_path / "nobody"
    folder.mkdir()
    async with running_agent(tmp_path, "--template", str(folder / "template.sock"), alone=True) as agent:
        reply: pb.PrepareReply = await Job(agent, SLEEP).prepare()
        assert alive(reply.fork_server_pid)
    shutil.rmtree(folder)
