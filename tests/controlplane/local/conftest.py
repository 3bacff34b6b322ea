"""Fixtures: a home folder for each test, and programs that replace those of a cluster."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from controlplane.local import cluster as local
from controlplane.local import stopping
from controlplane.local.commands import Commands
from tests.controlplane.local.supervised import PYTHON, Trial

AGENT = textwrap.dedent("""
    import sys
    from concurrent import futures
    import grpc
    from grpc_health.v1 import health, health_pb2_grpc
    server = grpc.server(futures.ThreadPoolExecutor(2))
    health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
    server.add_insecure_port(sys.argv[1])
    server.start()
    server.wait_for_termination()
""")

WORKER = textwrap.dedent("""
    import asyncio, os
    from temporalio import workflow
    from temporalio.client import Client
    from temporalio.worker import UnsandboxedWorkflowRunner, Worker

    @workflow.defn
    class Nothing:
        @workflow.run
        async def run(self) -> None: ...

    async def main():
        client = await Client.connect(os.environ["TEMPORAL_ADDRESS"], namespace=os.environ["TEMPORAL_NAMESPACE"])
        queue, runner = os.environ["EVERSTEP_TASK_QUEUE"], UnsandboxedWorkflowRunner()
        await Worker(client, task_queue=queue, workflows=[Nothing], workflow_runner=runner).run()

    asyncio.run(main())
""")

NAME = "trial"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home folder for the cluster ``NAME``, which is stopped at the end. No Temporal server is configured."""
    monkeypatch.setenv("EVERSTEP_HOME", str(tmp_path))
    for variable in ("TEMPORAL_ADDRESS", "TEMPORAL_PROFILE", "TEMPORAL_NAMESPACE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("TEMPORAL_CONFIG_FILE", str(tmp_path / "none.toml"))
    # The default ports may be in use, for example by a cluster of this computer's user.
    monkeypatch.setattr(local, "TEMPORAL_PORT", 0)
    monkeypatch.setattr(local, "UI_PORT", 0)
    yield tmp_path
    local.down(NAME)


@pytest.fixture
def commands() -> Commands:
    """Programs that do only what the readiness check needs: they poll the task queue, and answer the health check."""
    return Commands(
        worker=lambda: [*PYTHON, WORKER],
        agent=lambda machine, state, shm: [*PYTHON, AGENT, machine.address],
        template=lambda socket: [*PYTHON, "import time; time.sleep(600)", str(socket)],
    )


@pytest.fixture
def trial(tmp_path: Path) -> Iterator[Trial]:
    """A supervisor that has no processes yet."""
    trial = Trial(tmp_path, f"supervisor-test-{os.getpid()}")
    yield trial
    trial.stop()
    stopping.kill_all(trial.cluster_id, set())
    stopping.remove_shared_memory(trial.shm)
