"""Variables of which a job gives only the names: where the values come from, and that no file has them."""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agent.client import AgentClients
from agent.jobs.variables import read_variables
from agent.v1 import agent_pb2 as pb
from controlplane.start_checks.storage import check_storage
from everstep.errors import ConfigError
from everstep.model.job import JobSpec
from everstep.model.machine import Machine
from tests.agent.agents import Job, running_agent

SCRIPT = (
    "import hashlib, os\nprint(*[hashlib.sha256(os.environ[n].encode()).hexdigest() for n in ('ONE_KEY', 'TWO')])\n"
)
FIRST, SECOND = "first-very-secret", "second very secret"


def test_the_file_takes_precedence_over_the_agents_environment(tmp_path: Path) -> None:
    file = tmp_path / "env"
    file.write_text("# ours\n\nONE=file\nexport TWO='a b'\nTHREE=a=b \n")
    own = {"ONE": "agent", "FOUR": "agent"}
    found = read_variables(["ONE", "TWO", "THREE", "FOUR"], str(file), "m1", own)
    assert found == {"ONE": "file", "TWO": "a b", "THREE": "a=b", "FOUR": "agent"}
    assert read_variables(["ONE"], "", "m1", own) == {"ONE": "agent"}
    assert read_variables([], "", "m1", own) == {}


def test_missing_variables_are_named_without_values(tmp_path: Path) -> None:
    file = tmp_path / "env"
    file.write_text(f"ONE={FIRST}\n")
    with pytest.raises(ConfigError, match=r"TWO, THREE.* are neither in .*env nor .* on m7"):
        read_variables(["ONE", "TWO", "THREE"], str(file), "m7", {})
    with pytest.raises(ConfigError, match=r"ONE.* is not in the agent's environment on m7: .*env_file"):
        read_variables(["ONE"], "", "m7", {})
    with pytest.raises(ConfigError, match="cannot be read on m7: No such file"):
        read_variables(["ONE"], str(tmp_path / "nonsuch"), "m7", {})
    file.write_text(f"ONE={FIRST}\n{SECOND}\n")
    with pytest.raises(ConfigError, match=r"line 2 of env_file .* on m7 is not NAME=value") as caught:
        read_variables(["ONE"], str(file), "m7", {})
    assert SECOND not in str(caught.value)


async def test_ranks_get_the_values_and_no_file_has_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONE_KEY", FIRST)
    file = tmp_path / "env"
    file.write_text(f"TWO={SECOND}\n")
    async with running_agent(tmp_path / "agent") as agent:
        job = Job(agent, SCRIPT, ranks=1)
        names, place = ["ONE_KEY", "TWO"], str(file)
        asked = pb.PrepareRequest(request_id="prepare", job=job.name, env_from=[*names, "THREE"], env_file=place)
        with pytest.raises(ConfigError, match=r"THREE.* neither in .* nor in the environment of the agent on m1"):
            await agent.client.prepare(asked, timeout_s=60)
        assert list((await agent.client.describe()).jobs) == [], "nothing was started"
        asked = pb.PrepareRequest(request_id="prepare", job=job.name, env_from=names, env_file=place)
        await agent.client.prepare(asked, timeout_s=60)
        request = job.launch_request()
        request.program.env_from.extend(names)
        request.program.env_file = place
        await agent.client.launch(request, timeout_s=60)
        await job.exits(1)
        wanted = [hashlib.sha256(value.encode()).hexdigest() for value in (FIRST, SECOND)]
        assert (await job.log(0, stream=pb.ReadLogRequest.STDOUT)).decode().split() == wanted
        kept = [path for root in (agent.folder, agent.shm) for path in root.rglob("*") if path.is_file()]
        assert len(kept) > 3
        assert [path for path in kept if any(one.encode() in path.read_bytes() for one in (FIRST, SECOND))] == []
        file.write_text("")
        request.generation, request.request_id = 2, "launch-2"
        with pytest.raises(ConfigError, match=r"TWO, .* is neither"):
            await agent.client.launch(request, timeout_s=60)
        await job.release()


async def test_a_job_whose_variables_are_missing_is_not_started(tmp_path: Path) -> None:
    pool: Any = AgentClients()
    pool.aclose = pool.close
    async with running_agent(tmp_path / "agent") as agent, contextlib.aclosing(pool):
        spec = JobSpec(name="lacks", script="/job.py", env_from=["EVEN_MORE_SECRET"])
        control: Any = SimpleNamespace(agents=pool)
        machines = [Machine(name="m1", address=agent.address)]
        with pytest.raises(ConfigError, match=r"lacks is not started: EVEN_MORE_SECRET, .* environment on m1"):
            await check_storage(control, spec, machines)
        file = tmp_path / "env"
        file.write_text("EVEN_MORE_SECRET=1\n")
        await check_storage(control, spec.model_copy(update={"env_file": str(file)}), machines)
