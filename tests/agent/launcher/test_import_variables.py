"""A forked rank obeys variables that are read at import, as a fresh interpreter under torchrun does.

These are the variables that modules of the installed torch read while they are imported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from pathlib import Path
from typing import NamedTuple

import pytest

from activities.agents.convert import import_environment
from agent.launcher import fork_server
from agent.v1 import agent_pb2 as pb
from everstep.model.job import JobSpec
from everstep.rank.import_variables import BY_THE_RANK, read_at_import
from tests.agent.agents import Job, RunningAgent

pytestmark = pytest.mark.asyncio(loop_scope="module")
ROOT = Path(__file__).parents[3]

STATE = """
import gc, importlib, json, os, sys, warnings
found = {{"garbage collection": repr([gc.isenabled(), gc.get_threshold()])}}
gc.disable()  # the imports are quicker without
warnings.simplefilter("ignore")
sys.path.append({root!r})
from agent.launcher import fork_server
if len(sys.argv) > 2:
    with open(sys.argv[2], "w") as file:
        json.dump(sorted(fork_server.preload().read), file)
for name in fork_server.PRELOADED:
    importlib.import_module(name)
import torch

def simple(value):
    if isinstance(value, (list, tuple)):
        return all(map(simple, value))
    return isinstance(value, (bool, int, float, str, type(None)))

def shown(value):
    # torch makes some lists from sets of functions: their order is chance.
    unordered = isinstance(value, list) and all(isinstance(one, str) for one in value)
    return repr(sorted(value) if unordered else value)

found["allocator"] = torch._C._cuda_getAllocatorBackend() if hasattr(torch._C, "_cuda_getAllocatorBackend") else ""
for name, module in sorted(sys.modules.items()):
    if name.partition(".")[0] == "torch" and not name.startswith("torch._C") and module is not None:
        values = dict(vars(module))
        if "_config" in values and hasattr(module, "get_config_copy"):
            values |= {{f"config.{{key}}": value for key, value in module.get_config_copy().items()}}
        found |= {{f"{{name}}.{{key}}": shown(value) for key, value in values.items() if simple(value)}}
import tempfile
found["temporary"] = tempfile.gettempdir()
with open(sys.argv[1], "w") as file:
    json.dump(found, file)
"""

OTHERS = {
    "CI": "1",
    "CXX": "g++",
    "LOGLEVEL": "INFO",
    "PYTORCH_MATCHER_LOGLEVEL": "INFO",
    "PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync",
    "TORCH_LOGS": "dynamo",
    "TORCH_LOGS_FORMAT": "%(message)s",
    "TORCH_LOGS_OUT": "{folder}/logs",
    "TORCH_TRACE": "{folder}",
    "TORCH_DTRACE": "{folder}",
    "TORCHINDUCTOR_CACHE_DIR": "{folder}",
    "TORCHINDUCTOR_WORKER_START": "fork",
    "TORCHINDUCTOR_TLX_MODE": "off",
    "TORCH_COMPILE_WORKER_MODE": "thread",
    "TORCH_PYTHON_NATIVE_USER_GRAPH_ORDER_FN": "",
    "TORCHINDUCTOR_CUTLASS_DIR": "{folder}",
    "TORCHINDUCTOR_CK_DIR": "{folder}",
    "PYTHONHASHSEED": "1",
    "HOME": "{folder}",
    "TMPDIR": "{folder}",
    "TEMP": "{folder}",
    "TMP": "{folder}",
}
"""Variables for which 1 is no valid value, and the values that the test uses."""
NOT_HERE = {
    "KINETO_USE_DAEMON": "starts a thread at import, which no fork server may have",
    **dict.fromkeys(BY_THE_RANK, "a rank takes it over by itself"),
}


class Plain(NamedTuple):
    """An interpreter in which no variable is set."""

    names: list[str]
    """The variables that the imports of a fork server read."""
    state: dict[str, str]


def fresh(folder: Path, environment: dict[str, str], *more: Path) -> dict[str, str]:
    """Return a fresh interpreter's state after the imports of a fork server. ``more``: a file for the read names."""
    script, output = folder / "state.py", folder / uuid.uuid4().hex
    script.write_text(STATE.format(root=str(ROOT)))
    command = [sys.executable, str(script), str(output), *map(str, more)]
    subprocess.run(command, env=os.environ | environment, capture_output=True, check=True, timeout=100)
    found: dict[str, str] = json.loads(output.read_text())
    return found


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Plain:
    folder = tmp_path_factory.mktemp("plain")
    state = fresh(folder, fork_server.ONE_THREAD, folder / "names")
    return Plain(json.loads((folder / "names").read_text()), state)


@pytest.fixture(scope="module")
def names(plain: Plain) -> list[str]:
    return plain.names


async def test_a_fork_server_is_started_with_all_that_its_imports_read(names: list[str]) -> None:
    assert len([name for name in names if name.startswith("TORCH")]) > 50
    unknown = [name for name in names if not read_at_import(name) and name not in NOT_HERE]
    assert unknown == [], "these variables are missing in everstep/rank/import_variables.py"
    spec = JobSpec(name="job", script="/job.py", env=dict.fromkeys(names, "1"))
    assert import_environment(spec).keys() == set(names) - NOT_HERE.keys()


@pytest.mark.timeout(300)
async def test_a_rank_is_configured_as_a_fresh_interpreter_is(
    agent: RunningAgent, plain: Plain, tmp_path: Path
) -> None:
    given = {
        name: OTHERS.get(name, "1").format(folder=tmp_path)
        for name in {*plain.names, *OTHERS, "TORCH_COMPILE_DEBUG"} - NOT_HERE.keys()
        if name in OTHERS or not name.startswith(("PYTHON", "_PYTHON", "SYMPY", "MPMATH"))
    }
    spec = JobSpec(name="job", script="/job.py", env=given)
    job = Job(agent, STATE.format(root=str(ROOT)), ranks=1, args=(str(tmp_path / "rank"),))
    prepare = pb.PrepareRequest(request_id="p", job=job.name, env=import_environment(spec))
    await agent.client.prepare(prepare, timeout_s=100)
    request = job.launch_request()
    request.program.env.update(given | {"OMP_NUM_THREADS": "1"})
    await agent.client.launch(request)
    await job.exits(1)
    said = (await job.log(0, pb.ReadLogRequest.STDERR)).decode()
    assert (tmp_path / "rank").exists(), said
    assert "torch was imported before this rank" not in said
    rank = json.loads((tmp_path / "rank").read_text())
    await job.release()

    expected = fresh(tmp_path, given | {"OMP_NUM_THREADS": "1"})
    again = fresh(tmp_path, given | {"OMP_NUM_THREADS": "1"})
    by_chance = {key for key, value in expected.items() if again.get(key) != value}
    assert len(by_chance) < 20
    differing = {
        key: (rank.get(key), value)
        for key, value in expected.items()
        if rank.get(key) != value and key not in by_chance
    }
    assert not differing, "\n".join(f"{key}: {values}" for key, values in differing.items())
    assert (
        sum(plain.state.get(key) != value for key, value in expected.items()) > 100
    )  # the variables really change the state


async def test_a_variable_that_comes_too_late_is_said_in_the_log(agent: RunningAgent) -> None:
    job = Job(agent, "pass", ranks=1)
    await job.prepare()
    request = job.launch_request()
    request.program.env.update({"TORCH_COMPILE_DEBUG": "1", "MINE": "1", "NCCL_DEBUG": "INFO"})
    await agent.client.launch(request)
    await job.exits(1)
    said = (await job.log(0, pb.ReadLogRequest.STDERR)).decode()
    assert "everstep: TORCH_COMPILE_DEBUG: torch was imported before this rank was forked" in said
    await job.release()
