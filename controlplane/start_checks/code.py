"""The code of a job that starts: a snapshot of its folder is its first version, so that what runs was recorded."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from controlplane.client import Control
from everstep import environment
from everstep.errors import ConfigError
from everstep.model.job import IN_PLACE, JobSpec
from everstep.model.version import CodeVersion, JobVersion, VersionStatus


async def first_version(control: Control, spec: JobSpec) -> tuple[JobSpec, list[JobVersion], str]:
    """The job with its first version, that version, and what to tell its user; empty: nothing.

    Raises:
        ConfigError: the folder cannot be a version; says why and what to do.
        VersionStoreError: the store of versions does not take it.
    """
    if spec.code == IN_PLACE:
        return _in_place(spec), [], ""
    if not control.versions_url:
        if spec.code:
            raise ConfigError(
                f"code is {spec.code}, and nothing says where versions are kept: set {environment.VERSIONS} to what "
                "the workers have, or run it in place (--in-place)"
            )
        note = f"its code runs in place, and is not recorded: {environment.VERSIONS} says where versions are kept"
        return _in_place(spec), [], note
    from activities.versions.activities import version_of
    from activities.versions.packages import packages_of
    from activities.versions.snapshot import folder_snapshot
    from activities.versions.store import VersionStore

    folder = Path(spec.code) if spec.code else Path(spec.script).parent
    if spec.code and not Path(spec.script).is_relative_to(folder):
        raise ConfigError(f"the script {spec.script} is not in the folder {folder} that --code names")
    listing = asyncio.create_task(asyncio.to_thread(packages_of, spec.python))
    with await asyncio.to_thread(folder_snapshot, folder) as taken:
        runs = version_of(taken, CodeVersion.of(_in_place(spec)))
        runs = runs.model_copy(update={"packages": await listing})
        await VersionStore(control.versions_url).put(spec.name, runs, taken)
    kept = runs.model_copy(update={"packages": {}})
    first = JobVersion(number=1, runs=kept, status=VersionStatus.RUNNING, asked_ns=time.time_ns())
    return kept.applied(spec, 1), [first], ""


def _in_place(spec: JobSpec) -> JobSpec:
    return spec.model_copy(update={"code": "", "version": 1})
