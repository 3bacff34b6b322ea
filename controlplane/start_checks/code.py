"""The code of a job that starts: a snapshot of its folder becomes its first version, so it is on record."""

from __future__ import annotations

import getpass
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from controlplane.client import Control
from controlplane.start_checks.outside import outside_code
from everstep.errors import ConfigError
from everstep.model.job import IN_PLACE, JobSpec
from everstep.model.machine import Machine
from everstep.model.version import JobVersion, UpdateRequest, VersionStatus
from everstep.rank import environment


async def first_version(
    control: Control, spec: JobSpec, say: Callable[[str], None] = lambda _: None
) -> tuple[JobSpec, list[JobVersion], str]:
    """The job with its first version, that version, and a note for the user; empty: no note.

    Args:
        control: Connection to the cluster.
        spec: The job.
        say: Shows the progress of a long snapshot.

    Raises:
        ConfigError: the folder cannot be a version; the message has the reason and a remedy.
        VersionStoreError: the store of versions does not accept it.
    """
    own = spec.model_copy(update={"code": "", "version": 1})
    if spec.code == IN_PLACE:
        return own, [], ""
    if not control.versions_url:
        if spec.code:
            raise ConfigError(
                f"code is {spec.code}, and nothing says where versions are kept: set {environment.VERSIONS} to what "
                "the workers have, or run it in place (--in-place)"
            )
        note = f"its code runs in place, and is not recorded: {environment.VERSIONS} says where versions are kept"
        return own, [], note
    from activities.versions.make import first_version as made
    from activities.versions.progress import showing_progress
    from activities.versions.store import VersionStore

    folder = Path(spec.code) if spec.code else Path(spec.script).parent
    async with showing_progress(say) as progress:
        runs = await made(own, folder, VersionStore(control.versions_url), progress)
    runs = runs.model_copy(update={"packages": {}})
    request = UpdateRequest(operator=getpass.getuser())
    first = JobVersion(number=1, runs=runs, request=request, status=VersionStatus.RUNNING, asked_ns=time.time_ns())
    return runs.applied(spec, 1), [first], outside_code(spec, folder)


async def start_recorded(control: Control, spec: JobSpec, machines: Sequence[Machine]) -> None:
    """Start a job at step 0 with a snapshot of its code, as ``everstep run`` does.

    Raises:
        ConfigError: the folder cannot be a version, or a job of this name is running.
        VersionStoreError: the store of versions does not accept it.
        ClusterError: Temporal does not answer.
    """
    spec, versions, _ = await first_version(control, spec)
    await control.start_job(spec, machines, versions=versions)
