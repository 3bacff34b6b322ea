"""Starts a job with a version of its code that an earlier run recorded, e.g. to repeat some of its steps."""

from __future__ import annotations

import getpass
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass

from activities.versions.changes import packages_changed
from activities.versions.packages import packages_of
from activities.versions.store import VersionStore
from controlplane.client import Control
from everstep.base.text import first_of, listed
from everstep.errors import ConfigError, NoSuchJob
from everstep.model.job import JobSpec
from everstep.model.version import NAME_CHARACTERS, CodeVersion, JobVersion, UpdateRequest, VersionStatus
from everstep.rank import environment

NUMBER = re.compile(r"v?([1-9][0-9]{0,5})")
"""Form of a version's number, which is shorter than a prefix of an id."""
ID = re.compile(r"[0-9a-f]{7,64}")
"""Form of a version's id, or of a prefix of it."""
PACKAGES_NAMED = 5


@dataclass(frozen=True, slots=True)
class RecordedStart:
    """A job that starts with a recorded version."""

    spec: JobSpec
    versions: list[JobVersion]
    """The recorded version, as the first version of the new run."""
    notes: list[str]
    """Notes for the user: whether the new run repeats the old steps exactly."""


async def recorded_version(control: Control, spec: JobSpec, named: str, step: int | None) -> RecordedStart:
    """Give a job the code, script, arguments, variables and folder of a version that an earlier run recorded.

    Args:
        control: Connection to the cluster.
        spec: The job; its other settings stay.
        named: The version: its number in the last run, or its id.
        step: Completed steps at the start of the job; None: step 0, or the latest checkpoint.

    Raises:
        ConfigError: there is no such version, or it is not stored; the message lists the versions.
        VersionStoreError: the store cannot be read, or has deleted the code.
        ClusterError: Temporal does not answer.
    """
    if not control.versions_url:
        raise ConfigError(
            f"the store of versions is not known here: set {environment.VERSIONS} to the value that the workers have"
        )
    store = VersionStore(control.versions_url)
    before, runs = await _find(store, spec.name, named, await _of_last_run(control, spec.name))
    if not runs.code:
        raise ConfigError(
            f"{_name(before, runs)} ran in place, from {runs.script}: its files were not recorded, and may have "
            "changed. Start the job without --version to run the present files"
        )
    await store.keep(spec.name, runs)
    notes = [f"code: {_name(before, runs)}{_origin(runs)}"]
    if step is not None and not _ran_at(before, step):
        ran = f"{before.name} ran {_ranges(before)}" if before and before.ranges else "this version ran no step"
        notes.append(
            f"warning: in the last run of {spec.name} {ran}, so the steps from {step} on do not repeat its steps"
        )
    if changed := packages_changed(runs.packages, packages_of(runs.python)):
        packages = first_of(changed[:PACKAGES_NAMED], len(changed))
        notes.append(f"warning: packages have changed since the version was recorded: {packages}. Losses may differ")
    why = f"repeats {_name(before, runs)}" + (f" from step {step}" if step is not None else "")
    bare = runs.model_copy(update={"packages": {}})
    request = UpdateRequest(operator=getpass.getuser(), reason=why)
    first = JobVersion(number=1, runs=bare, request=request, status=VersionStatus.RUNNING, asked_ns=time.time_ns())
    return RecordedStart(bare.applied(spec, 1), [first], notes)


async def _of_last_run(control: Control, job: str) -> list[JobVersion]:
    """The versions of the last run, from its workflow, or from the ledger if Temporal has deleted the workflow."""
    try:
        return (await control.state(job)).versions
    except NoSuchJob:
        ledger = await control.ledger()
    if ledger is None:
        return []
    from activities.ledger.ledger import Ledger

    return [version for record in await ledger.call(Ledger.versions, job) if (version := record.parsed())]


async def _find(
    store: VersionStore, job: str, named: str, last_run: Sequence[JobVersion]
) -> tuple[JobVersion | None, CodeVersion]:
    """The named version: its entry in the last run (None: it has none), and its code in the store."""
    if number := NUMBER.fullmatch(named):
        before = next((version for version in last_run if version.number == int(number[1])), None)
        if before is None or before.runs is None:
            why = f"v{number[1]} was refused" if before else f"the last run of {job} has no v{number[1]}"
            raise ConfigError(f"{why}; {_list(last_run)}. A version of an older run is named by its id")
        identifier = before.runs.id
    elif ID.fullmatch(named):
        identifier = named
    else:
        raise ConfigError(
            f"--version {named} is not a version: give its number, as in 'everstep versions {job}', or at least the "
            "first seven digits of its id"
        )
    found = await store.versions(job, identifier)
    if len(found) > 1:
        raise ConfigError(
            f"--version {named} may be {listed([code.id[:NAME_CHARACTERS] for code in found])}: give more digits"
        )
    if not found:
        raise ConfigError(
            f"version {named} of job {job} is not in the store of versions {store.url}; {_list(last_run)}"
        )
    runs = found[0]
    return next((version for version in last_run if version.runs and version.runs.id == runs.id), None), runs


def _ran_at(version: JobVersion | None, step: int) -> bool:
    """Whether a version ran the step after this number of completed steps; True if its steps are not numbered."""
    ranges = version.ranges if version else []
    return any(begin < 0 or (begin <= step and (end < 0 or step < end)) for _, begin, end in ranges)


def _ranges(version: JobVersion) -> str:
    texts = [f"from step {begin} {f'to {end}' if end >= 0 else 'on'}" for _, begin, end in version.ranges]
    return listed(texts)


def _name(before: JobVersion | None, runs: CodeVersion) -> str:
    return before.name if before else f"version {runs.id[:NAME_CHARACTERS]}"


def _origin(runs: CodeVersion) -> str:
    origin = runs.origin
    commit = f", commit {origin.commit[:NAME_CHARACTERS]}{' with changes' if origin.dirty else ''}"
    return f", of {origin.folder}{commit if origin.commit else ''}" if origin.folder else ""


def _list(last_run: Sequence[JobVersion]) -> str:
    names = [version.name for version in last_run if version.runs]
    return f"there are {listed(names)}" if names else "the versions of its last run are not known"
