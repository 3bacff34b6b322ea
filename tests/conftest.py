"""Fixtures for all tests: a real Temporal server, found or built as for users, and a token for agents."""

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
"""Files in tests/drills that start clusters of their own, or none."""
TORCHS_OWN = "TORCHINDUCTOR_CACHE_DIR"

# How long an example takes says more about what else runs on the computer than about the code.
settings.register_profile("everstep", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("everstep")


def pytest_configure(config: pytest.Config) -> None:
    """All processes of a test run share one template; the one that has started the others keeps its folder."""
    os.environ.setdefault("GOGC", "400")  # servers of Temporal with small memories else look for garbage all the time
    if not hasattr(config, "workerinput"):
        templates.offer()


def pytest_unconfigure(config: pytest.Config) -> None:
    """Nothing of it is left."""
    if not hasattr(config, "workerinput"):
        templates.withdraw()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """Files stay together, and so do the drills that share a cluster: each process that runs some starts another."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return together(super()._split_scope(nodeid))

    return Scheduling(config, log) if config.getvalue("dist") == "loadfile" else None


def together(file: str) -> str:
    """What a test file is run together with, in one process."""
    folder, _, name = file.rpartition("/")
    return folder if folder == "tests/drills" and name not in OWN_CLUSTERS else file


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Drills first, what starts no process last: nothing long should be waited for at the end."""

    def turn(item: pytest.Item) -> int:
        if item.get_closest_marker("drill"):
            return 0
        return 2 if "tests/everstep/" in item.nodeid else 1

    items.sort(key=turn)


def pytest_collection() -> None:
    """What is imported stays, so that nobody need look for garbage in it: a third of the time of the collection."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Never look there again: a walk over all of torch stops a workflow task, or a loop, for long."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def _nothing_of_torchs_is_left() -> Iterator[None]:
    """One of torch's optimizers sets a variable in the process in which it steps. From another environment than its own
    no template forks: later tests would start fork servers themselves, which others have to collect."""
    before = os.environ.get(TORCHS_OWN)
    yield
    if before is None:
        os.environ.pop(TORCHS_OWN, None)


@pytest.fixture(scope="session", autouse=True)
def token_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The token of the agents that tests start, for them and for whoever calls them."""
    path = tmp_path_factory.mktemp("token") / "token"
    private.replace(path, "the token of the tests\n")
    os.environ[environment.AGENT_TOKEN_FILE] = str(path)
    return path


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def server() -> AsyncIterator[WorkflowEnvironment]:
    """An in-memory server with the settings of the embedded one, for all tests of this process of pytest."""
    async with await _server() as environment:
        yield environment


@pytest.fixture
async def temporal(server: WorkflowEnvironment) -> Client:
    """A client of it. Others have been there: a test needs its own task queue and its own names of jobs."""
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
