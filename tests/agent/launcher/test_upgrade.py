"""When an agent of another release takes over, running ranks keep the release of their fork server."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from agent.v1 import agent_pb2 as pb
from tests.agent.agents import Job, alive, running_agent, until

ROOT = Path(__file__).parents[3]
SHIPPED = ("everstep", "agent", "activities", "workflows", "controlplane", "drills", "console")
SCRIPT = "import everstep, sys, time; print(everstep.__file__, flush=True); time.sleep(600)"

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(120)]


async def test_a_fork_server_of_another_release_is_replaced_when_its_ranks_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in SHIPPED:
        shutil.copytree(ROOT / name, tmp_path / "other" / name, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "other"))
    async with running_agent(tmp_path / "machine", alone=True) as agent:
        job = Job(agent, SCRIPT, ranks=1)
        before = (await job.prepare()).fork_server_pid
        await job.launch(1)
        await job.entered()
        agent.kill()
        monkeypatch.delenv("PYTHONPATH")
        await agent.start()
        (known,) = (await agent.client.describe()).jobs
        assert known.fork_server_pid == before and alive(before), "the old fork server stays while its rank lives"
        await job.launch(1)
        assert alive(before)
        await job.stop(1)
        await job.launch(2)
        await job.entered()
        (known,) = (await agent.client.describe()).jobs
        assert known.fork_server_pid != before
        await until(lambda: not alive(before), "the old fork server is gone; init collects it, since its agent is gone")
        again = await agent.client.prepare(pb.PrepareRequest(request_id="again", job=job.name), timeout_s=60)
        assert (again.fork_server_pid, again.reused) == (known.fork_server_pid, True)
        async with asyncio.timeout(30):
            while len(said := (await job.log(0, pb.ReadLogRequest.STDOUT)).decode().splitlines()) < 2:  # noqa: ASYNC110 - there is no event
                await asyncio.sleep(0.05)
        assert said == [str(folder / "everstep" / "__init__.py") for folder in (tmp_path / "other", ROOT)]
