"""The metrics that Prometheus reads from a real agent with a real job."""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio
from prometheus_client.parser import text_string_to_metric_families

from agent.main import AgentOptions, serve
from agent.security import ServerSecurity
from agent.v1 import agent_pb2 as pb
from everstep.errors import ConfigError
from tests.agent.agents import HOST, Job, RunningAgent, free_port
from tests.metric_names import AGENT, INSPECTED

pytestmark = pytest.mark.asyncio(loop_scope="module")

MONITOR = """
[memory]
interval_s = 0.2
[disk-space]
free_share = 1.0   # so that every file system is full
"""
STEPS = 12
SCRIPT = """
import sys
import torch
import everstep

run = everstep.join(tp=1, pp=1)
torch.manual_seed(run.rank)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.Adam(model.parameters())
state = run.checkpoint(model=model, optimizer=optimizer)
for step in run.steps(int(sys.argv[1]), state):
    loss = model(torch.rand(2, 4)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    run.report(step, loss=loss)
"""

Shown = dict[str, dict[frozenset[tuple[str, str]], float]]


class Scraped(RunningAgent):
    """An agent that serves metrics."""

    def __init__(self, folder: Path) -> None:
        self.metrics_port = free_port(HOST)
        super().__init__(folder, "--metrics", f"{HOST}:{self.metrics_port}", monitor=MONITOR)

    def read(self) -> Shown:
        with urllib.request.urlopen(f"http://{HOST}:{self.metrics_port}/metrics", timeout=60) as answer:
            text = answer.read().decode()
        shown: Shown = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                assert sample.labels.pop("machine") == "m1"
                shown.setdefault(sample.name, {})[frozenset(sample.labels.items())] = sample.value
        return shown

    async def shows(self, ready: Callable[[Shown], bool]) -> Shown:
        async with asyncio.timeout(60):
            while True:
                shown = await asyncio.to_thread(self.read)
                if ready(shown):
                    return shown
                await asyncio.sleep(0.05)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scraped(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Scraped]:
    agent = Scraped(tmp_path_factory.mktemp("agent"))
    try:
        await agent.start()
        yield agent
    finally:
        await agent.close()


def of(**labels: str) -> frozenset[tuple[str, str]]:
    return frozenset(labels.items())


async def test_an_address_that_is_none_is_told_before_anything_else(tmp_path: Path) -> None:
    insecure = ServerSecurity(insecure=True)
    options = AgentOptions("m1", f"{HOST}:1", tmp_path / "state", tmp_path / "shm", security=insecure, metrics="here")

    with pytest.raises(ConfigError, match="--metrics: 'here' is not host:port"):
        await serve(options)
    assert not options.state_dir.exists()


async def test_inspections_are_shown(scraped: Scraped) -> None:
    finding = of(inspection="disk-space", reason="disk-full", verdict="faulty")
    shown = await scraped.shows(lambda shown: finding in shown.get("everstep_findings", {}))

    assert shown["everstep_machine_verdict"][of(verdict="faulty")] == 1
    assert shown["everstep_inspection_verdict"][of(inspection="memory", verdict="healthy")] == 1
    assert shown["everstep_memory_total_bytes"][of()] > 1 << 20
    assert shown["everstep_inspection_looks_total"][of(inspection="memory")] >= 1
    assert shown["everstep_series_left_out"][of()] == 0


async def test_ranks_and_their_copies_are_shown_and_all_of_it_is_in_the_reference(scraped: Scraped) -> None:
    job = Job(scraped, SCRIPT, ranks=1, args=(str(STEPS),))
    await job.prepare()
    request = job.launch_request()
    request.checkpoint.CopyFrom(pb.CheckpointOptions(slots=3, disk=True, disk_every_steps=5, disk_keep=2))
    request.program.env["EVERSTEP_TOPOLOGY"] = "1,1,1,1,pp-dp-tp"
    await scraped.client.launch(request, timeout_s=60)
    await job.exits(1)
    rank = {"training_job": job.name, "rank": "0"}
    on_disk = of(**rank, tier="disk")
    shown = await scraped.shows(lambda shown: on_disk in shown.get("everstep_rank_checkpoint_step", {}))

    assert shown["everstep_rank_completed_steps"][of(**rank)] == STEPS
    assert shown["everstep_rank_checkpoint_step"][of(**rank, tier="memory")] == STEPS
    assert shown["everstep_rank_checkpoint_age_seconds"][on_disk] > 0
    assert shown["everstep_ranks"][of(training_job=job.name, state="ended")] == 1
    assert shown["everstep_job_generation"][of(training_job=job.name)] == 1
    assert shown["everstep_observations_waiting"][of()] >= 1

    assert AGENT.keys() <= shown.keys()
    assert {name for name in shown.keys() - AGENT.keys() if name.startswith("everstep_")} <= INSPECTED.keys()
    await job.release()
    shown = await asyncio.to_thread(scraped.read)
    assert "everstep_ranks" not in shown
