"""A real local cluster. Its agents serve only clients with its token, and the token is visible only in its file."""

from __future__ import annotations

import asyncio
import stat
from pathlib import Path

import pytest

from agent.client import AgentClient
from agent.security import ClientSecurity, Presented
from agent.v1 import agent_pb2 as pb
from controlplane.client import Control
from controlplane.local import cluster as local
from controlplane.local import cluster_processes
from controlplane.local.cluster_file import ClusterFile
from everstep.errors import AgentRefuses, AgentUnreachable

NAME = "trial"
SCRIPT = "import everstep, os, time\nprint(os.environ, flush=True)\nrun = everstep.join()\ntime.sleep(600)\n"


def seen_of(token: bytes, cluster: ClusterFile) -> list[str]:
    """Return where a token is visible: command lines and environments of the cluster's processes, and all its files."""
    places = [
        Path(f"/proc/{pid}/{what}")
        for pid in cluster_processes.of_cluster(cluster.id)
        for what in ("cmdline", "environ")
    ]
    assert len(places) >= 8
    places += [path for root in (cluster.home, cluster.shm) for path in root.rglob("*") if path.is_file()]
    return [str(path) for path in places if path.exists() and token in path.read_bytes()]


async def refusal_of(client: AgentClient) -> str:
    while True:
        try:
            await client.describe()
        except AgentRefuses as error:
            return str(error)
        except AgentUnreachable:  # on a busy machine the agent may not answer yet
            continue
        return "answered"


async def test_the_token_of_a_cluster(home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EVERSTEP_AGENT_CA_FILE", "/of/another/deployment.pem")
    cluster = await asyncio.to_thread(local.up, NAME, machines=1, standbys=0, workers=1)
    path = cluster.home / "token"
    assert cluster.token_file == path
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for folder in (cluster.home, cluster.home / "logs", cluster.shm, cluster.shm.parent):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    token = path.read_bytes().strip()
    assert len(token) >= 32

    [machine] = cluster.machines
    for stranger in (ClientSecurity(), ClientSecurity.from_environment()):
        async with AgentClient(machine.address, Presented(ClientSecurity(token_file=stranger.token_file))) as client:
            assert "no valid token" in await refusal_of(client)

    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    async with await Control.connect(NAME) as control:
        agent = control.agents.get(machine.address)
        await agent.prepare(pb.PrepareRequest(request_id="1", job="job"), timeout_s=60)
        ranks = [pb.RankLaunch(rank=0, env={"RANK": "0"})]
        launch = pb.LaunchRequest(request_id="2", job="job", generation=1, ranks=ranks)
        launch.program.script = str(script)
        await agent.launch(launch, timeout_s=60)
        async for now in agent.progress(pb.ProgressRequest(job="job", interval_s=0.02)):
            if now.ranks and now.ranks[0].milestones.joined:
                break
        assert await asyncio.to_thread(seen_of, token, cluster) == [str(path)]
        request = pb.ReadLogRequest(job="job", rank=0)
        said = b"".join([chunk.data async for chunk in agent.read_log(request)])
        assert b"EVERSTEP_JOB" in said and b"TOKEN" not in said

    assert await asyncio.to_thread(local.up, NAME, machines=1, standbys=0, workers=1) == cluster
    assert path.read_bytes().strip() == token
