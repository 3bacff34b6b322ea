"""Fixtures for drills on real local clusters, with real ranks that are really killed."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from typing import Any

import pytest
import pytest_asyncio

from drills import Drill, DrillCluster, DrillResult, drill_request
from drills.runner import References

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

SMALL: dict[str, Any] = {"machines": 2, "ranks_per_machine": 2, "tp": 2, "pp": 1, "at_step": 8, "steps": 24}
"""A small job with four ranks. What a drill shows does not depend on the job's size."""
SPREAD: dict[str, Any] = {"machines": 4, "ranks_per_machine": 1, "tp": 2, "pp": 1, "at_step": 10, "steps": 22}
"""Four machines with tp and dp groups on several machines.

So each machine has a peer outside its groups: m0 and m3, m1 and m2.
"""

LINES = 30
"""How many last lines of each log of the cluster are shown for a failed test."""
FAILED = pytest.StashKey[bool]()
DrillOf = Callable[..., Awaitable[DrillResult]]


class Clusters:
    """Holds the cluster that all drills of one pytest process share, and makes a new cluster after a failed drill.

    What a failed drill left, for example a job that still runs, would make the next drills fail, too.
    """

    def __init__(self, machines: int = 4, standbys: int = 0) -> None:
        self._machines, self._standbys = machines, standbys
        self.references = References()
        self._opened: DrillCluster | None = None

    async def get(self) -> DrillCluster:
        """Return the cluster, and start it if there is none."""
        if self._opened is None:
            self._opened = await DrillCluster(machines=self._machines, standbys=self._standbys, workers=2).__aenter__()
        return self._opened

    async def close(self) -> list[str]:
        """Stop the cluster, and return what was left of it."""
        opened, self._opened = self._opened, None
        if opened is None:
            return []
        await opened.__aexit__(None, None, None)
        return opened.leaked


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Remember for the fixtures of a test that the test failed."""
    report = yield
    if report.failed:
        item.stash[FAILED] = True
    return report


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def clusters() -> AsyncIterator[Clusters]:
    """Holds the cluster of all drills. Nothing of the cluster may be left at the end."""
    shared = Clusters()
    yield shared
    assert await shared.close() == []


@pytest_asyncio.fixture(loop_scope="package")
async def cluster(clusters: Clusters, request: pytest.FixtureRequest) -> AsyncIterator[DrillCluster]:
    """A cluster on which no drill has failed so far."""
    opened = await clusters.get()
    yield opened
    if request.node.stash.get(FAILED, False):
        for log in sorted((opened.home / "logs").glob("*.log")):  # the logs are removed with the cluster
            print(f"--- {log.name}", *log.read_text(errors="replace").splitlines()[-LINES:], sep="\n")
        await clusters.close()


@pytest.fixture
def drill(cluster: DrillCluster, clusters: Clusters) -> DrillOf:
    """Return a function that runs a drill of a small job."""

    async def run(fault: str, **options: Any) -> DrillResult:
        request = drill_request(fault=fault, **(SMALL | options))
        return await Drill(cluster, request, clusters.references).run()

    return run


@pytest.fixture
def recovered() -> Callable[..., None]:
    """Return a check of what must be true for every fault that one reattempt repairs."""

    def check(result: DrillResult, *, lost: int | None = 1) -> None:
        assert result.problems == []
        assert result.ok and result.fired
        assert result.resolution == "reattempt"
        assert len(result.incidents) == 1
        assert result.generations == 2
        assert result.leaked == []
        assert result.duplicates == 0
        assert result.detected_s is not None and result.recovered_s is not None
        assert 0 < result.detected_s < result.recovered_s
        assert result.ettr is not None and 0 < result.ettr < 1
        if lost is None:
            assert result.losses_match is None
        else:
            assert result.losses_match is True
            assert result.steps_lost is not None and result.steps_lost <= lost

    return check


@pytest.fixture
def spread(drill: DrillOf) -> DrillOf:
    """Return a function that runs a drill of a job on four machines."""

    async def run(fault: str, **options: Any) -> DrillResult:
        return await drill(fault, **(SPREAD | options))

    return run


@pytest.fixture
def went_on() -> Callable[..., None]:
    """Return a check for drills that lose or damage copies of state: the job must continue from other copies."""

    def check(result: DrillResult, restored_from: dict[str, int], *, lost: int, observed: int = 0) -> None:
        assert result.problems == []
        assert result.ok and result.fired
        assert result.resolution == "reattempt"
        assert result.restored_from == restored_from
        assert result.steps_lost is not None and result.steps_lost <= lost
        assert result.losses_match is True
        assert len(result.incidents) == 1 + observed
        assert result.leaked == [] and result.duplicates == 0 and result.evicted == []

    return check
