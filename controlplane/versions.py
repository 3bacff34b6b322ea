"""Versions of a job's code, as a command asks for them and reads them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from controlplane.client import Control
from controlplane.updates import ask
from everstep.errors import ClusterError
from everstep.model.job_state import job_workflow_id
from everstep.model.version import JobVersion, UpdateRequest, VersionStatus

POLL_S = 0.2
"""Between two looks at a version that is tried or applied (ours)."""
OVER = frozenset({VersionStatus.REFUSED, VersionStatus.WITHDRAWN, VersionStatus.SUPERSEDED, VersionStatus.SUSPECT})


async def ask_update(control: Control, job: str, request: UpdateRequest) -> tuple[str, JobVersion | None]:
    """Ask a job for another version of its code; returns what is done, and the version; None: it names none.

    Raises:
        ConfigError: it cannot be done; says why.
        ClusterError: the job, or Temporal, does not answer.
    """
    missing = f"there is no job {job} that runs: see 'everstep status'"
    asked = request.model_dump(mode="json", exclude_defaults=True)
    said = await ask(control, job_workflow_id(job), "update", asked, who=f"job {job}", missing=missing)
    if request.cancel:
        return said, None
    asked_for = [one for one in await versions_of(control, job) if request in (one.request, one.again)]
    return said, asked_for[-1] if asked_for else None


async def versions_of(control: Control, job: str) -> list[JobVersion]:
    """All versions that a job knows, in order.

    Raises:
        NoSuchJob: there is none.
        ClusterError: it does not answer.
    """
    return (await control.state(job)).versions


async def follow(control: Control, job: str, number: int, *, urgent: bool) -> AsyncIterator[JobVersion]:
    """A version as it changes, until it waits for a recovery, runs, or never will.

    Args:
        control: Of the cluster.
        job: Its name.
        number: Of the version.
        urgent: It is applied now: until the job has done a step with it, or has taken it back.
    """
    while True:
        try:
            state = await control.state(job)
        except ClusterError:
            await asyncio.sleep(POLL_S)
            continue
        version = next((one for one in state.versions if one.number == number), None)
        if version is None:
            return
        yield version
        if version.status in OVER or (version.status is VersionStatus.PENDING and not urgent):
            return
        if version.status is VersionStatus.RUNNING and state.status in {"running", "parked"} and version.ranges:
            return
        if version.status is VersionStatus.REPLACED or state.status in {"finished", "failed", "stopped"}:
            return
        await asyncio.sleep(POLL_S)
