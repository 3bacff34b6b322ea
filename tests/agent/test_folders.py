"""The folders that an agent accepts. Other users can neither read them nor put files there."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.v1 import agent_pb2 as pb
from controlplane.local import mounts
from everstep.errors import AgentError, ConfigError
from everstep.system.memory import is_hugetlbfs
from tests.agent.agents import HOST, Job, RunningAgent, agent_command, alive, free_port, running_agent, until
from tests.strangers import NOBODY, as_nobody, needs_another_user, python_as_nobody


@pytest.fixture
def taken() -> Iterator[Path]:
    """A path in /dev/shm that does not exist yet."""
    path = Path("/dev/shm") / f"everstep-test-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    yield path
    if path.is_symlink():
        path.unlink()
    shutil.rmtree(path, ignore_errors=True)


def refusal(folder: Path, shm: Path, *, state: Path | None = None) -> str:
    """Return the error of an agent that does not start with these folders."""
    command = agent_command(f"{HOST}:{free_port(HOST)}", state or folder / "state", shm)
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


def test_shared_memory_that_others_can_write_to_is_refused(tmp_path: Path, taken: Path) -> None:
    taken.mkdir()
    for mode in (0o777, 0o1777, 0o770):
        taken.chmod(mode)
        said = refusal(tmp_path, taken)
        assert f"{taken} is writable for other users (mode {mode:04o})" in said
        assert "chmod 700" in said


def test_a_folder_of_huge_pages_is_refused_with_a_way_to_have_them(tmp_path: Path) -> None:
    if said := mounts.why_not(tmp_path):
        pytest.skip(said)
    shm = tmp_path / "huge"
    shm.mkdir(mode=0o700)
    subprocess.run(["mount", "-t", "hugetlbfs", "-o", "mode=0700", "none", str(shm)], check=True)
    try:
        assert is_hugetlbfs(shm)
        said = refusal(tmp_path, shm)
    finally:
        subprocess.run(["umount", str(shm)], check=True)
    assert not is_hugetlbfs(shm)
    assert "is on hugetlbfs, where checkpoints cannot be saved" in said and "huge=within_size" in said


def test_a_folder_that_another_user_made_before_us_is_refused(tmp_path: Path, taken: Path) -> None:
    assert as_nobody("/bin/mkdir", "-m", "0777", str(taken)).returncode == 0
    assert f"{taken} belongs to user nobody" in refusal(tmp_path, taken)
    inner = taken / "m1"
    assert f"{taken}, above {inner}, belongs to user nobody" in refusal(tmp_path, inner)
    assert not inner.exists()


def test_a_link_that_another_user_made_before_us_is_refused(tmp_path: Path, taken: Path) -> None:
    ours = tmp_path / "ours"
    ours.mkdir(mode=0o700)
    assert as_nobody("/bin/ln", "-s", str(ours), str(taken)).returncode == 0
    assert f"{taken} is a link" in refusal(tmp_path / "agent", taken)
    assert f"{taken}, above" in refusal(tmp_path / "agent", taken / "m1")
    assert list(ours.iterdir()) == []


@pytest.mark.parametrize("kind", ["state", "shm"])
def test_files_of_another_user_in_the_folder_are_refused(tmp_path: Path, taken: Path, kind: str) -> None:
    needs_another_user()
    victim = tmp_path / "victim"
    victim.write_text("precious")
    taken.mkdir(mode=0o777)
    taken.chmod(0o777)
    name = {"state": "observations.new", "shm": "job-report-0-1.new"}[kind]
    assert as_nobody("/bin/ln", "-s", str(victim), str(taken / name)).returncode == 0
    taken.chmod(0o700)  # this comes too late, since the link already exists
    own = tmp_path / "own"
    said = refusal(tmp_path, taken) if kind == "shm" else refusal(tmp_path, own, state=taken)
    assert f"{taken / name} is a link" in said
    (taken / name).unlink()
    (taken / "file").touch()
    os.chown(taken / "file", NOBODY, NOBODY)
    said = refusal(tmp_path, taken) if kind == "shm" else refusal(tmp_path, own, state=taken)
    assert f"{taken / 'file'} belongs to user nobody" in said
    assert victim.read_text() == "precious"


def test_a_parent_in_which_others_can_rename_is_refused(tmp_path: Path, taken: Path) -> None:
    open_parent = tmp_path / "open"
    open_parent.mkdir()
    open_parent.chmod(0o777)
    said = refusal(tmp_path, taken, state=open_parent / "m1")
    assert f"{open_parent}, above {open_parent / 'm1'}, is writable for other users (mode 0777)" in said


async def test_other_users_cannot_see_the_files_of_an_agent(tmp_path: Path) -> None:
    before = os.umask(0)  # the modes of files must not depend on the umask
    try:
        async with running_agent(tmp_path) as agent:
            job = Job(agent, "import everstep, time; run = everstep.join(); time.sleep(600)\n", ranks=1)
            await job.prepare()
            await job.launch()
            await job.entered()
            open_to_others = [
                f"{path} {stat.filemode(path.lstat().st_mode)}"
                for root in (agent.state, agent.shm)
                for path in (root, *root.rglob("*"))
                if path.lstat().st_mode & 0o077
            ]
            assert open_to_others == []
            assert len(list(agent.shm.rglob("*"))) > 2
            for root in (agent.state, agent.shm):
                if not os.geteuid():
                    assert "Permission denied" in as_nobody("/bin/ls", str(root)).stderr
    finally:
        os.umask(before)


async def test_a_folder_that_others_could_read_is_made_private_and_used(tmp_path: Path) -> None:
    agent = RunningAgent(tmp_path)
    folders = (agent.state, agent.state / "jobs", agent.shm)
    for path in folders:
        path.mkdir(parents=True)
        path.chmod(0o755)
    try:
        await agent.start()
        for path in folders:
            assert stat.S_IMODE(path.stat().st_mode) == 0o700
    finally:
        await agent.close()


async def test_a_shared_memory_folder_that_another_user_made_later_is_refused(tmp_path: Path) -> None:
    needs_another_user()
    async with running_agent(tmp_path) as agent:
        shutil.rmtree(agent.shm)  # some systems do this when the user logs out
        assert as_nobody("/bin/mkdir", "-m", "0777", str(agent.shm)).returncode == 0
        try:
            job = Job(agent, "import time; time.sleep(600)\n", ranks=1)
            with pytest.raises((AgentError, ConfigError), match="belongs to user nobody"):
                await job.prepare()
            assert list(agent.shm.iterdir()) == []
        finally:
            shutil.rmtree(agent.shm)


async def test_a_fork_server_serves_only_its_own_user(tmp_path: Path) -> None:
    needs_another_user()
    program = (
        "path = sys.argv[1]\n"
        "with socket.socket(socket.AF_UNIX) as one:\n"
        "    one.settimeout(20)\n"
        "    one.connect(path)\n"
        "    try:\n"
        '        one.sendall(b\'{"id": 1, "op": "end"}\\n\')\n'
        "        print(one.recv(4096))\n"
        "    except (BrokenPipeError, ConnectionResetError):\n"
        "        print(b'')\n"
    )
    async with running_agent(tmp_path) as agent:
        job = Job(agent, "import time; time.sleep(600)\n", ranks=1)
        server = (await job.prepare()).fork_server_pid
        [path] = agent.fork_servers.glob("*.sock")
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        # Make the file system allow the access, so that only the fork server itself can refuse it.
        link = Path("/dev/shm") / f"everstep-test-{uuid.uuid4().hex[:8]}.sock"
        os.link(path, link)
        try:
            path.chmod(0o666)
            done = python_as_nobody("import socket, sys", program, str(link))
        finally:
            link.unlink()
        assert done.stdout == "b''\n", done.stderr
        await until(lambda: alive(server), "the fork server lives")
        await job.launch()
        assert await job.entered()
        assert (await agent.client.describe()).jobs[0].generation == 1
        await agent.client.release(pb.ReleaseRequest(job=job.name), timeout_s=60)
