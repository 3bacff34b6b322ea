"""Requests of commands for other versions of a job's code."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from controlplane.client import Control
from controlplane.operator_updates import ask
from everstep.errors import ClusterError, NoSuchFolder
from everstep.model.job_state import job_workflow_id
from everstep.model.version import CodeVersion, JobVersion, UpdateRequest, VersionStatus
from everstep.rank import environment

POLL_S = 0.2
"""Time between two polls of a version that is tried or applied, seconds."""
OVER = frozenset({VersionStatus.REFUSED, VersionStatus.WITHDRAWN, VersionStatus.SUPERSEDED, VersionStatus.SUSPECT})


async def made_here(
    control: Control, job: str, request: UpdateRequest, say: Callable[[str], None]
) -> tuple[UpdateRequest, str]:
    """Make the requested version on this computer, if the folder and the store of versions can be reached from here.

    Args:
        control: Connection to the cluster.
        job: Name of the job.
        request: Request for other code.
        say: Shows the progress of a long snapshot.

    Returns:
        The request, which contains the stored version if it was made here; and a text that says why a worker has to
        make the version. The text is empty if no worker has to.

    Raises:
        NoSuchJob: there is no such job.
        ConfigError: the version cannot be made.
        VersionStoreError: the store does not accept the version.
        ClusterError: the job does not answer.
    """
    if not (request.code or request.git):
        return request, ""
    if not control.versions_url:
        return request, f"{environment.VERSIONS} is not set here: a worker reads the folder, as the worker sees it"
    from activities.versions.make import folder_of, next_version
    from activities.versions.progress import showing_progress
    from activities.versions.store import VersionStore

    store, state = VersionStore(control.versions_url), await control.state(job)
    running = next((version.runs for version in state.versions if version.number == state.spec.version), None)
    running = await store.full(job, running or CodeVersion.of(state.spec))
    try:
        async with showing_progress(say) as progress:
            made = await next_version(job, running, request, store, progress)
    except NoSuchFolder:
        return (
            request,
            f"there is no folder {folder_of(running, request)} here: a worker reads it, as the worker sees it",
        )
    return request.model_copy(update={"made": made.model_copy(update={"packages": {}})}), ""


async def ask_update(control: Control, job: str, request: UpdateRequest) -> tuple[str, JobVersion | None]:
    """Request another version of a job's code, or cancel one.

    Returns:
        The answer of the job as text, and the requested version; None: the request was a cancellation.

    Raises:
        ConfigError: the job refuses; the message says why.
        ClusterError: the job, or Temporal, does not answer.
    """
    missing = f"no job {job} is running: see 'everstep status'"
    fields = request.model_dump(mode="json", exclude_defaults=True)
    answer = await ask(control, job_workflow_id(job), "update", fields, name=f"job {job}", missing=missing)
    if request.cancel:
        return answer, None
    versions = (await control.state(job)).versions
    requested = [version for version in versions if request in (version.request, version.again)]
    return answer, requested[-1] if requested else None


async def follow(control: Control, job: str, number: int, *, urgent: bool) -> AsyncIterator[JobVersion]:
    """Yield a version again and again, until it waits for a recovery, runs, or is given up.

    Args:
        control: Connection to the cluster.
        job: Name of the job.
        number: Number of the version.
        urgent: Whether the version is applied now. If so, it is followed until the job has stepped with it, or has
            rolled it back.
    """
    while True:
        try:
            state = await control.state(job)
        except ClusterError:
            await asyncio.sleep(POLL_S)
            continue
        version = next((version for version in state.versions if version.number == number), None)
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
