"""Timers of pending versions. A job is woken when a version is forced, and at no other time."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest

from everstep.model.job import JobSpec
from everstep.model.job_state import JobState
from everstep.model.version import CodeVersion, JobVersion, VersionStatus, read_update
from workflows import updates
from workflows.updates import Updates

HOUR_NS = 3600 * 10**9


@dataclass
class Clock:
    """A workflow's clock that a test moves."""

    hour: float = 0.0
    timers: list[tuple[float, asyncio.Future[None]]] = field(default_factory=list)

    def time_ns(self) -> int:
        return round(self.hour * HOUR_NS)

    def patched(self, _: str) -> bool:
        return True

    async def sleep(self, seconds: float, *, summary: str) -> None:
        timer = asyncio.get_running_loop().create_future()
        self.timers.append((round(self.hour + seconds / 3600, 6), timer))
        await timer

    async def run_to(self, hour: float) -> list[float]:
        """Let time pass. Returns the times at which the job was woken."""
        woken = []
        for at, timer in sorted(self.timers, key=lambda one: one[0]):
            if at <= hour and not timer.done():
                self.hour = at
                timer.set_result(None)
                woken.append(at)
                await settled()
        self.hour = hour
        return woken


async def settled() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


def job() -> JobState:
    """Return a job in which version 3 runs. Version 2 ran well before."""
    spec = JobSpec(name="gpt", script="/x.py", machines=1, ranks_per_machine=1, version=3)
    code = [CodeVersion(code=name, script="t.py") for name in "abc"]
    versions = [
        JobVersion(number=1, runs=code[0], status=VersionStatus.REPLACED, ranges=[(1, 0, 9)]),
        JobVersion(number=2, runs=code[1], status=VersionStatus.REPLACED, ranges=[(2, 9, 99)], steady=True),
        JobVersion(number=3, runs=code[2], status=VersionStatus.RUNNING, ranges=[(3, 99, -1)]),
    ]
    return JobState(spec=spec, machines=[], status="running", generation=3, versions=versions)


@pytest.mark.parametrize(
    ("requests", "woken"),
    [
        ([{"version": 2}], [24.0]),
        ([{"version": 2}, {"version": 2, "window_h": 1}], [2.0]),
        ([{"version": 2, "window_h": 2}, {"version": 2, "window_h": 5}], [6.0]),
        ([{"version": 2}, {"cancel": 2}], []),
        ([{"version": 2}, {"cancel": 2}, {"rollback": True, "window_h": 1}], [3.0]),
        ([{"version": 1, "window_h": 3}, {"version": 2}], [3.0, 25.0]),
    ],
)
async def test_a_job_is_woken_when_a_version_is_forced(
    monkeypatch: pytest.MonkeyPatch, requests: list[dict[str, Any]], woken: list[float]
) -> None:
    clock = Clock()
    monkeypatch.setattr(updates, "workflow", clock)
    found = Updates(job(), lambda: None)
    for hour, request in enumerate(requests):
        clock.hour = hour
        found.accept(read_update({"operator": "ada", **request}))
        await settled()
    assert await clock.run_to(30.0) == woken
    assert found.due is bool(woken)
