"""Fixtures for all tests: a real Temporal server, which is found or built as for users, and a token for agents."""

from __future__ import annotations

import gc
import os
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import HealthCheck, settings
from temporalio.client import Client
from temporalio.testing import WorkflowEnvironment

from activities.payloads import DATA_CONVERTER
from controlplane.local import temporal_binary
from controlplane.local.temporal_server import DYNAMIC_CONFIG
from everstep.rank import environment
from everstep.system import private_files as private
from tests import templates
from workflows import attributes

OWN_CLUSTERS = ("test_command.py", "test_deployed.py", "test_requests.py", "test_soak.py", "test_verdict.py")
"""Files in tests/drills whose tests start their own clusters or need no cluster."""
TORCHS_OWN = "TORCHINDUCTOR_CACHE_DIR"

# The time that an example takes depends more on the computer's load than on the code. So it has no limit.
settings.register_profile("everstep", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("everstep")


def pytest_configure(config: pytest.Config) -> None:
    """Offer one template to all processes of a test run. The main process keeps the template's folder."""
    os.environ.setdefault("GOGC", "400")  # otherwise Temporal servers with little data collect garbage all the time
    if not hasattr(config, "workerinput"):
        templates.offer()


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the template and remove its folder."""
    if not hasattr(config, "workerinput"):
        templates.withdraw()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """Run all tests of a group (see ``together``) in one process, since each process with drills starts a cluster."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return together(super()._split_scope(nodeid))

    return Scheduling(config, log) if config.getvalue("dist") == "loadfile" else None


def together(file: str) -> str:
    """Return the group of a test file.

    All drills that share a cluster are one group. Every other file is a group of its own.
    """
    folder, _, name = file.rpartition("/")
    return folder if folder == "tests/drills" and name not in OWN_CLUSTERS else file


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run drills first, and tests that start no process last. So no long test runs alone at the end."""

    def turn(item: pytest.Item) -> int:
        if item.get_closest_marker("drill"):
            return 0
        return 2 if "tests/everstep/" in item.nodeid else 1

    items.sort(key=turn)


def pytest_collection() -> None:
    """Turn off garbage collection during collection.

    It would take a third of the time, and find nothing, since imported modules stay.
    """
    gc.disable()


def pytest_collection_finish() -> None:
    """Exclude the imported objects from garbage collections, which would block workflow tasks for long."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def _nothing_of_torchs_is_left() -> Iterator[None]:
    """Remove a variable that one of torch's optimizers sets in this process when it steps.

    The template forks only processes with its own environment. With the variable, agents of later tests would have to
    start their fork servers themselves.
    """
    before = os.environ.get(TORCHS_OWN)
    yield
    if before is None:
        os.environ.pop(TORCHS_OWN, None)


@pytest.fixture(scope="session", autouse=True)
def token_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file with the token of the agents that tests start. Agents and clients read it."""
    path = tmp_path_factory.mktemp("token") / "token"
    private.replace(path, "the token of the tests\n")
    os.environ[environment.AGENT_TOKEN_FILE] = str(path)
    return path


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def server() -> AsyncIterator[WorkflowEnvironment]:
    """An in-memory Temporal server with the embedded server's settings, for all tests of one pytest process."""
    async with await _server() as environment:
        yield environment


@pytest.fixture
async def temporal(server: WorkflowEnvironment) -> Client:
    """A client of the shared server. Since tests share it, each test needs its own task queue and job names."""
    config = server.client.service_client.config
    return await Client.connect(config.target_host, data_converter=DATA_CONVERTER)


async def _server() -> WorkflowEnvironment:
    found = temporal_binary.installed(print) or temporal_binary.obtain(print)
    # A low limit lets a test see continue-as-new after a few incidents instead of thousands.
    limits = {"limit.historyCount.suggestContinueAsNew": "100"}
    settings = [
        part for pair in (DYNAMIC_CONFIG | limits).items() for part in ("--dynamic-config-value", "=".join(pair))
    ]
    return await WorkflowEnvironment.start_local(
        dev_server_existing_path=str(found[0]),
        dev_server_startup_timeout=timedelta(seconds=60),
        dev_server_extra_args=settings,
        search_attributes=attributes.ALL,
        data_converter=DATA_CONVERTER,
    )
