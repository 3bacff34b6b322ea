"""Two clusters of one user at the same time. Each has its own server and workers. Run by ``make drills``."""

from __future__ import annotations

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from controlplane.client import Control
from controlplane.local import cluster as local
from everstep.base.addresses import parse_address
from everstep.model.job import JobSpec
from everstep.model.job_state import job_workflow_id

pytestmark = [pytest.mark.drill, pytest.mark.timeout(300)]
NAMES = ("one", "two")
ROUNDS = 20
JOB = "same"
"""The name of a job that both clusters have at the same time."""


async def run_job(name: str, script: Path) -> set[int]:
    """Run a job on a cluster. Returns the process ids of the workers that executed it."""
    async with await Control.connect(name, local=True) as control:
        await control.start_job(JobSpec(name=JOB, script=str(script)), control.machines[:1])
        assert (await control.result(JOB)).outcome == "finished"
        history = await control.client.get_workflow_handle(job_workflow_id(JOB)).fetch_history()
    told = [event.workflow_task_started_event_attributes.identity for event in history.events]
    return {int(found.group()) for identity in told if (found := re.match(r"\d+", identity))}


@pytest.mark.parametrize("round_", range(ROUNDS))
async def test_each_cluster_has_its_own_server_and_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, round_: int
) -> None:
    monkeypatch.setenv("EVERSTEP_HOME", str(tmp_path))
    script = tmp_path / "train.py"
    script.write_text("print('trained')\n")
    with ThreadPoolExecutor() as threads:  # both start at once, as if two people started them
        came = threads.map(lambda name: local.up(name, machines=1, standbys=0, workers=1), NAMES)
        found = dict(zip(NAMES, came, strict=True))
    try:
        assert len({one.temporal_address for one in found.values()}) == len(NAMES)
        assert len({one.namespace for one in found.values()}) == len({one.task_queue for one in found.values()}) == 2
        for name, cluster in found.items():
            running = local.processes(cluster)
            _, port = parse_address(cluster.temporal_address)
            listening = {one.laddr.port for one in psutil.Process(running["temporal"]).net_connections("tcp")}
            assert port in listening, f"the server at the address of {name} belongs to {name}"
            assert await run_job(name, script) == {running["worker-0"]}
    finally:
        for name in NAMES:
            local.down(name)


def test_two_people_start_clusters_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes start the clusters at the same time."""
    monkeypatch.setenv("EVERSTEP_HOME", str(tmp_path))
    command = [sys.executable, "-P", "-m", "console.main", "up", "--machines", "1", "--standbys", "0", "--workers", "1"]
    started = [
        subprocess.Popen([*command, "--cluster", name], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for name in NAMES
    ]
    said = [process.communicate()[0] for process in started]
    try:
        assert [process.returncode for process in started] == [0, 0], said
        addresses = [re.search(r"Temporal +(\S+),", text) for text in said]
        assert all(addresses)
        assert len({found.group(1) for found in addresses if found}) == len(NAMES)
    finally:
        for name in NAMES:
            local.down(name)
