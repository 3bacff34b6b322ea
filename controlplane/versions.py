"""Versions of a job's code, as a command asks for them and reads them."""

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
"""Between two looks at a version that is tried or applied."""
OVER = frozenset({VersionStatus.REFUSED, VersionStatus.WITHDRAWN, VersionStatus.SUPERSEDED, VersionStatus.SUSPECT})


async def made_here(
    control: Control, job: str, request: UpdateRequest, say: Callable[[str], None]
) -> tuple[UpdateRequest, str]:
    """A request whose version is made on this computer, where its folder and the store of versions are.

    Args:
        control: Of the cluster.
        job: Its name.
        request: For other code.
        say: Is told how far a snapshot is that takes long.

    Returns:
        The request, with the version that was put into the store, or as it was; and why workers have to make it, empty:
        they need not.

    Raises:
        NoSuchJob: there is none.
        ConfigError: the version cannot be made.
        VersionStoreError: the store does not take it.
        ClusterError: the job does not answer.
    """
    if not (request.code or request.git):
        return request, ""
    if not control.versions_url:
        return request, f"{environment.VERSIONS} is not set here: workers read the folder, as they see it"
    from activities.versions.make import folder_of, next_version
    from activities.versions.progress import telling
    from activities.versions.store import VersionStore

    store, state = VersionStore(control.versions_url), await control.state(job)
    running = next((one.runs for one in state.versions if one.number == state.spec.version), None)
    running = await store.full(job, running or CodeVersion.of(state.spec))
    try:
        async with telling(say) as progress:
            made = await next_version(job, running, request, store, progress)
    except NoSuchFolder:
        return request, f"there is no {folder_of(running, request)} here: workers read it, as they see it"
    return request.model_copy(update={"made": made.model_copy(update={"packages": {}})}), ""


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
