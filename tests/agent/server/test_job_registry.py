"""Data of an earlier run of the same job name is deleted. No other job waits for this deletion."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from agent.server.job_registry import JobRegistry

OLDER, NEWER = "20261121-100000.000-aaaaaaaa", "20261121-110000.000-bbbbbbbb"


async def test_a_job_does_not_wait_for_the_cleanup_of_another_job(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = JobRegistry(SimpleNamespace(machine="m1"), SimpleNamespace())  # type: ignore[arg-type]
    ends = asyncio.Event()

    async def release(_: Any) -> int:
        await ends.wait()  # this takes as long as a rank that dies slowly
        return 0

    monkeypatch.setattr(jobs, "release", release)
    monkeypatch.setattr(jobs, "new_runner", lambda *_: None)
    for job, run in (("remains", OLDER), ("trains", NEWER)):
        jobs.runners[job] = SimpleNamespace(record=SimpleNamespace(run=run, released=False))  # type: ignore[assignment]
    turning = asyncio.create_task(jobs._turn_to("remains", NEWER))
    await asyncio.sleep(0)

    async with asyncio.timeout(10):
        await jobs._turn_to("trains", NEWER)
        await jobs._turn_to("starts", NEWER)

    assert not turning.done()
    ends.set()
    await turning
