"""A real agent tries scripts in processes that are forked from its fork servers."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf import json_format

from agent.v1 import agent_pb2 as pb
from everstep.errors import AgentUnreachable, CodeMissing, ConfigError
from tests.agent.agents import RunningAgent, alive, prepared, running_agent, until
from tests.agent.code.snapshots import folder, put

pytestmark = pytest.mark.asyncio(loop_scope="module")

Outcome = pb.TryCodeReply
JOIN = "import everstep, lib\nrun = everstep.join(tp=2)\nraise SystemExit('went on')\n"
LIB = "import os\nprint('lib is here')\n"


def request(code: str, *args: str, timeout_s: float = 60.0, **env: str) -> pb.TryCodeRequest:
    shared = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "EVERSTEP_TOPOLOGY": "2,2,2,1,pp-dp-tp"}
    return pb.TryCodeRequest(
        request_id=uuid.uuid4().hex,
        job="tried",
        program=pb.Program(code=code, script="main.py", args=args, env=shared | env),
        timeout_s=timeout_s,
    )


async def outcome(agent: RunningAgent, files: dict[str, str], *args: str) -> pb.TryCodeReply:
    return await agent.client.try_code(request(await put(agent, files), *args))


def trials(agent: RunningAgent) -> list[Path]:
    return list((agent.live / "trials").glob("*"))


@pytest.fixture(autouse=True)
def nothing_is_left(agent: RunningAgent) -> Iterator[None]:
    yield
    assert trials(agent) == []


@pytest.mark.parametrize(
    "script",
    [
        JOIN,
        "import torch.distributed as dist\ndist.init_process_group('gloo')\nraise SystemExit('went on')\n",
        "from torch.distributed import init_process_group as begin\nbegin('nccl')\nraise SystemExit('went on')\n",
        "import torch\nmodel = torch.nn.Linear(1, 1)\noptimizer = torch.optim.SGD(model.parameters())\n"
        "model(torch.ones(1)).backward()\noptimizer.step()\nraise SystemExit('went on')\n",
        "import atexit, everstep\natexit.register(print, 'no')\ntry:\n    everstep.join(tp=2)\nfinally:\n    1 / 0\n",
    ],
)
async def test_it_ends_well_where_the_script_joins_the_job(agent: RunningAgent, script: str) -> None:
    reply = await outcome(agent, {"main.py": script, "lib.py": LIB})
    assert (reply.outcome, reply.text) == (Outcome.JOINED, "")


@pytest.mark.parametrize("imported", ["import everstep", "from everstep import join"])
async def test_a_group_that_is_made_before_the_sizes_are_known_is_told(agent: RunningAgent, imported: str) -> None:
    script = f"{imported}\nimport torch.distributed as dist\ndist.init_process_group('gloo')\n"
    reply = await outcome(agent, {"main.py": script})
    assert (reply.outcome, reply.text.partition(":")[0]) == (
        Outcome.JOINED,
        "it makes its process group before it calls everstep.join()",
    )


@pytest.mark.parametrize(
    ("files", "args", "said"),
    [
        ({"main.py": JOIN, "lib.py": "def f(:\n"}, (), r"lib\.py does not compile:.*line 1.*SyntaxError"),
        ({"main.py": "def f(:\n"}, (), r"main\.py does not compile:.*SyntaxError"),
        ({"main.py": JOIN}, (), r"File \"main.py\", line 1, in <module>.*No module named 'lib'\n\(exit code 1\)"),
        ({"main.py": "import everstep\neverstep.join(tp=4)\n"}, (), r"TopologyError: the script joins with"),
        (
            {"main.py": "import argparse\nargparse.ArgumentParser().parse_args()\n"},
            ("--learning-rat", "1"),
            r"unrecognized arguments: --learning-rat 1\n\(exit code 2\)",
        ),
        ({"main.py": "import os\nos.kill(os.getpid(), 11)\n"}, (), r"\(ended by SIGSEGV\)"),
        ({"main.py": "print('x' * 100_000)\nraise SystemExit('enough')\n"}, (), r"^x+\nenough\n\(exit code 1\)$"),
        ({"main.py": "import os\nos._exit(3)\n"}, (), r"^\(exit code 3\)$"),
    ],
)
async def test_what_fails_before_is_told(
    agent: RunningAgent, files: dict[str, str], args: tuple[str, ...], said: str
) -> None:
    reply = await outcome(agent, files, *args)
    assert reply.outcome == Outcome.FAILED
    assert re.search(said, reply.text, re.DOTALL), reply.text
    assert len(reply.text.encode()) <= 8192
    assert str(folder(agent)) not in reply.text


async def test_a_file_that_nothing_imports_may_be_anything(agent: RunningAgent) -> None:
    files = {"main.py": JOIN, "lib.py": LIB, "tests/data/wrong.py": "def f(:\n"}
    assert (await outcome(agent, files)).outcome == Outcome.JOINED


async def test_compiled_modules_lie_beside_their_sources_for_the_ranks_to_come(agent: RunningAgent) -> None:
    code = await put(agent, {"main.py": JOIN, "lib.py": LIB, "sub/late.py": "1\n"})
    assert (await agent.client.try_code(request(code))).outcome == Outcome.JOINED
    names = sorted(path.name.split(".")[0] for path in (folder(agent) / code).rglob("*.pyc"))
    assert names == ["late", "lib", "main"]
    assert await agent.client.has_code([code]) == [code]


async def test_an_end_before_joining_is_told_and_no_failure(agent: RunningAgent) -> None:
    reply = await outcome(agent, {"main.py": "print('nothing to do')\n"})
    assert (reply.outcome, reply.text) == (Outcome.ENDED, "nothing to do\n")


async def test_a_slow_one_is_killed_with_all_that_it_started(agent: RunningAgent, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    script = (
        "import os, subprocess, time\nprint('begins', flush=True)\n"
        "one = subprocess.Popen(['sleep', '600'])\n"
        "two = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        f"open({str(pids)!r}, 'w').write(f'{{os.getpid()}} {{one.pid}} {{two.pid}}')\ntime.sleep(600)\n"
    )
    reply = await agent.client.try_code(request(await put(agent, {"main.py": script}), timeout_s=2.0))
    assert (reply.outcome, reply.text) == (Outcome.SLOW, "begins\n")
    for pid in map(int, pids.read_text().split()):
        await until(lambda pid=pid: not alive(pid), f"{pid} is gone")  # type: ignore[misc]


async def test_several_at_once_and_one_that_is_asked_for_twice_runs_once(agent: RunningAgent, tmp_path: Path) -> None:
    script = f"import os, everstep\nopen({str(tmp_path)!r} + f'/{{os.getpid()}}', 'w')\neverstep.join()\n"
    code = await put(agent, {"main.py": script})
    asked = [request(code) for _ in range(3)]
    replies = await asyncio.gather(*(agent.client.try_code(one) for one in [*asked, asked[0]]))
    replies.append(await agent.client.try_code(asked[1]))
    assert [reply.outcome for reply in replies] == [Outcome.JOINED] * 5
    assert len(os.listdir(tmp_path)) == 3  # noqa: PTH208


async def test_it_has_nothing_of_the_job_that_runs(agent: RunningAgent, tmp_path: Path) -> None:
    """A trial uses no memory, file, fork server or store of the running job, whatever its environment says."""
    seen = tmp_path / "seen"
    script = f"import os, everstep\nopen({str(seen)!r}, 'w').write(repr(dict(os.environ)))\neverstep.join()\n"
    job = await prepared(agent, "import time\ntime.sleep(600)\n")
    await job.launch()
    await job.entered()
    before = sorted((agent.shm / job.name).iterdir())
    [described] = (await agent.client.describe()).jobs
    one = request(await put(agent, {"main.py": script}), EVERSTEP_REPORT_FILE="/x", MASTER_PORT="1", MINE="yes")
    one.job = job.name
    assert (await agent.client.try_code(one)).outcome == Outcome.JOINED
    env = eval(seen.read_text())
    names = {"EVERSTEP_TOPOLOGY", "EVERSTEP_JOB", "EVERSTEP_MACHINE", "EVERSTEP_TRIAL"}
    assert {name for name in env if name.startswith("EVERSTEP_")} == names
    assert (env["MINE"], env["RANK"]) == ("yes", "0")
    assert env["MASTER_PORT"] != "1"
    assert sorted((agent.shm / job.name).iterdir()) == before
    [after] = (await agent.client.describe()).jobs
    assert [rank.alive for rank in after.ranks] == [True, True]
    assert after.fork_server_pid == described.fork_server_pid
    await job.release()


async def test_variables_of_the_machine_are_those_of_a_launch(agent: RunningAgent, tmp_path: Path) -> None:
    (tmp_path / "env").write_text("SECRET=s3cret\n")
    one = request(await put(agent, {"main.py": "import os\nprint(os.environ['SECRET'][::-1])\n"}))
    one.program.env_from.append("SECRET")
    one.program.env_file = str(tmp_path / "env")
    assert (await agent.client.try_code(one)).text == "terc3s\n"
    one.program.env_from.append("NOWHERE")
    one.request_id = "another"
    with pytest.raises(ConfigError, match="NOWHERE"):
        await agent.client.try_code(one)


async def test_missing_and_damaged_code_has_to_be_brought_first(agent: RunningAgent) -> None:
    with pytest.raises(CodeMissing):
        await agent.client.try_code(request("0" * 64))
    code = await put(agent, {"main.py": JOIN, "lib.py": LIB + "#\n"})
    path = folder(agent) / code / "lib.py"
    path.chmod(0o600)
    path.write_text(path.read_text().replace("here", "gone"))
    with pytest.raises(CodeMissing):
        await agent.client.try_code(request(code))
    for change, said in (
        ({"program": {"script": "no.py"}}, "not in the code"),
        ({"program": {"cwd": "/no"}}, "cwd"),
        ({"timeout_s": 0.0}, "0 s"),
    ):
        one = request(await put(agent, {"main.py": JOIN}))
        json_format.ParseDict(change, one)
        with pytest.raises(ConfigError, match=said):
            await agent.client.try_code(one)


async def test_a_trial_ends_with_its_agent(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    script = f"import os, time\nopen({str(pid_file)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)\n"
    async with running_agent(tmp_path / "agent", "--prewarm") as agent:
        code = await put(agent, {"main.py": script})
        asked = asyncio.create_task(agent.client.try_code(request(code)))
        await until(lambda: pid_file.exists() and bool(pid_file.read_text()), "the trial runs")
        agent.kill()
        with pytest.raises(AgentUnreachable):
            await asked
        await until(lambda: not alive(int(pid_file.read_text())), "the trial's process is gone")
        await agent.start()
        await until(lambda: trials(agent) == [], "the trial's folder is gone")


async def test_a_fork_server_that_dies_meanwhile_proves_nothing(agent: RunningAgent, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    script = (
        f"import os, time, everstep\nif not os.path.exists({str(pid_file)!r}):\n"
        f"    open({str(pid_file)!r}, 'w').write(f'{{os.getpid()}} {{os.getppid()}}')\n    time.sleep(600)\n"
        "everstep.join()\n"
    )
    code = await put(agent, {"main.py": script})
    asked = asyncio.create_task(agent.client.try_code(request(code)))
    await until(lambda: pid_file.exists() and len(pid_file.read_text().split()) == 2, "the trial runs")
    pid, server = map(int, pid_file.read_text().split())
    os.kill(server, signal.SIGKILL)
    assert (await asked).outcome == Outcome.JOINED, "the script is tried again in another fork server"
    assert not alive(pid)


async def test_where_other_imports_were_tried_the_ranks_with_them_are_launched(agent: RunningAgent) -> None:
    job = await prepared(agent, "import time\ntime.sleep(600)\n", ranks=1)
    await job.launch()
    imports = pb.Imports(env={"TORCH_LOGS_FORMAT": "short"})  # torch reads this variable when it is imported
    trial = request(await put(agent, {"main.py": JOIN, "lib.py": LIB}))
    trial.job = job.name
    trial.program.imports.CopyFrom(imports)
    assert (await agent.client.try_code(trial, timeout_s=60)).outcome == Outcome.JOINED
    servers = set(agent.fork_servers.glob("*.sock"))
    await job.stop()

    store = pb.StartStoreRequest(request_id="store", job=job.name, generation=2, imports=imports)
    await agent.client.start_store(store, timeout_s=60)
    launch = job.launch_request(2)
    launch.program.imports.CopyFrom(imports)
    launch.program.env.update(imports.env)
    await agent.client.launch(launch, timeout_s=60)

    await job.entered()
    assert b"torch was imported before this rank" not in await job.log(0)
    assert set(agent.fork_servers.glob("*.sock")) < servers
