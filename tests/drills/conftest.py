"""Drills on real local clusters: real ranks, real kills."""

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
"""Four ranks and some seconds; what a drill shows does not depend on the size."""
SPREAD: dict[str, Any] = {"machines": 4, "ranks_per_machine": 1, "tp": 2, "pp": 1, "at_step": 10, "steps": 22}
"""Four machines with tp and dp groups across them, so that each has a peer outside its groups: m0 and m3, m1 and m2."""

LINES = 30
"""Last lines of each log of the cluster that are shown of a test that failed."""
FAILED = pytest.StashKey[bool]()
DrillOf = Callable[..., Awaitable[DrillResult]]


class Clusters:
    """The cluster that all drills of a process of pytest share, and a new one after a drill that failed.

    What a failed drill left, e.g. a job that runs on, would fail the next ones too.
    """

    def __init__(self, machines: int = 4, standbys: int = 0) -> None:
        self._machines, self._standbys = machines, standbys
        self.references = References()
        self._opened: DrillCluster | None = None

    async def get(self) -> DrillCluster:
        """The cluster, brought up if there is none."""
        if self._opened is None:
            self._opened = await DrillCluster(machines=self._machines, standbys=self._standbys, workers=2).__aenter__()
        return self._opened

    async def close(self) -> list[str]:
        """Take the cluster down; returns what was left of it."""
        opened, self._opened = self._opened, None
        if opened is None:
            return []
        await opened.__aexit__(None, None, None)
        return opened.leaked


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note on a test that it failed, for its fixtures."""
    report = yield
    if report.failed:
        item.stash[FAILED] = True
    return report


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def clusters() -> AsyncIterator[Clusters]:
    """Holds the cluster of all drills; nothing of it may be left at the end."""
    shared = Clusters()
    yield shared
    assert await shared.close() == []


@pytest_asyncio.fixture(loop_scope="package")
async def cluster(clusters: Clusters, request: pytest.FixtureRequest) -> AsyncIterator[DrillCluster]:
    """A cluster on which nothing went wrong so far."""
    opened = await clusters.get()
    yield opened
    if request.node.stash.get(FAILED, False):
        for log in sorted((opened.home / "logs").glob("*.log")):  # nobody can read them later
            print(f"--- {log.name}", *log.read_text(errors="replace").splitlines()[-LINES:], sep="\n")
        await clusters.close()


@pytest.fixture
def drill(cluster: DrillCluster, clusters: Clusters) -> DrillOf:
    """Run a drill of a small job."""

    async def run(fault: str, **options: Any) -> DrillResult:
        request = drill_request(fault=fault, **(SMALL | options))
        return await Drill(cluster, request, clusters.references).run()

    return run


@pytest.fixture
def recovered() -> Callable[..., None]:
    """What holds for every fault that one reattempt heals."""

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
    """Run a drill of a job over four machines."""

    async def run(fault: str, **options: Any) -> DrillResult:
        return await drill(fault, **(SPREAD | options))

    return run


@pytest.fixture
def went_on() -> Callable[..., None]:
    """What holds when copies of state were lost or damaged and the job went on from others."""

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
