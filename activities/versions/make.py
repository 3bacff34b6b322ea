"""Makes a version: from a folder, a git revision, or the running code with other arguments or variables.

Workers make versions, and commands do too: for the first version of a job, and for updates from folders that only the
command can read.
"""

from __future__ import annotations

import asyncio
import difflib
import os
import posixpath
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import structlog

from activities.versions.changes import FileChanges, describe_changes
from activities.versions.git import GitFolder, work_tree_of
from activities.versions.packages import packages_of
from activities.versions.progress import SnapshotProgress
from activities.versions.snapshot import CodeSnapshot, folder_snapshot, revision_snapshot
from activities.versions.store import VersionStore
from agent.state.reads import Reads
from everstep.errors import ConfigError, VersionStoreError
from everstep.model.job import JobSpec
from everstep.model.version import CodeVersion, UpdateRequest

STORAGE_S = 300.0
"""The time limit for reading the files of a folder, seconds."""
NO_STORE = (
    "there is no store of versions, so code can only run in place: start all workers with the same "
    "--versions URL, or EVERSTEP_VERSIONS"
)

T = TypeVar("T")
log = structlog.get_logger("versions")
_threads = Reads()


async def first_version(
    spec: JobSpec, folder: Path, store: VersionStore, progress: SnapshotProgress | None = None
) -> CodeVersion:
    """Store the first version of a job, before it starts.

    Args:
        spec: The job's specification; its script is an absolute path.
        folder: The folder with the script.
        store: The store of versions.
        progress: The progress of the snapshot, which is updated; None: it is not needed.

    Raises:
        ConfigError: no version can be made of the folder.
        VersionStoreError: the store does not accept the version.
    """
    with await _on_storage(lambda: folder_snapshot(folder, progress), str(folder)) as snapshot:
        version = CodeVersion.of(spec).model_copy(
            update={
                "code": snapshot.digest,
                "script": script_in(snapshot, folder, spec.script),
                "cwd": spec.cwd or str(Path(spec.script).parent),
                "cwd_by_default": not spec.cwd,
                "packages": await _threads.do(lambda: packages_of(spec.python)),
                "origin": snapshot.origin,
                "files": len(snapshot.files),
                "bytes": snapshot.bytes,
            }
        )
        await store.put(spec.name, version, snapshot)
    return version


async def next_version(
    job: str,
    running: CodeVersion,
    request: UpdateRequest,
    store: VersionStore | None,
    progress: SnapshotProgress | None = None,
) -> CodeVersion:
    """Make the requested version, and store it.

    Args:
        job: The name of the job.
        running: The running version, with its origin.
        request: The request, which names a folder, a revision, or neither.
        store: The store; None: there is none.
        progress: The progress of the snapshot, which is updated; None: it is not needed.

    Raises:
        NoSuchFolder: the folder is not on this machine.
        ConfigError: the version cannot be made.
        VersionStoreError: the store does not accept the version.
    """
    packages = asyncio.create_task(_threads.do(lambda: packages_of(running.python)))
    try:
        version = running.model_copy(
            update={
                "args": running.args if request.args is None else request.args,
                "env": running.env | (request.env or {}),
            }
        )
        if not (request.code or request.git):
            if request.script:
                version = version.model_copy(update={"script": await _other_script(running, request.script, store)})
            if store is not None:
                version = version.model_copy(update={"packages": await packages})
                await store.put(job, version, None)
            return version
        if store is None:
            raise ConfigError(NO_STORE)
        folder = folder_of(running, request)
        with await _on_storage(lambda: _snapshot(folder, request.git, progress), str(folder)) as snapshot:
            version = version.model_copy(
                update={
                    "code": snapshot.digest,
                    "script": script_in(snapshot, folder, request.script or _script_of(running, folder)),
                    "cwd": running.cwd or _folder_of(running),
                    "cwd_by_default": running.cwd_by_default or not running.cwd,
                    "packages": await packages,
                    "origin": snapshot.origin,
                    "files": len(snapshot.files),
                    "bytes": snapshot.bytes,
                }
            )
            await store.put(job, version, snapshot)
        return version
    finally:
        packages.cancel()


async def changed(before: CodeVersion, after: CodeVersion, store: VersionStore | None, redact: Sequence[str]) -> str:
    """Return the changes between two versions, as text; parts that cannot be read any more are left out."""
    files: FileChanges | None = None
    if store is not None and before.code and after.code and before.code != after.code:
        try:
            with await store.code(before.code) as old, await store.code(after.code) as new:
                files = await _threads.do(lambda: FileChanges.between(old, new))
        except VersionStoreError as error:
            log.warning("the changed files are not known", reason=str(error))
    commits = await _on_storage(lambda: _commits(before, after), after.origin.folder)
    return await _threads.do(lambda: describe_changes(before, after, files, commits, redact))


def folder_of(running: CodeVersion, request: UpdateRequest) -> Path:
    """Return the folder from which a requested version is made.

    Raises:
        ConfigError: the request names no folder, and the origin of the running code is not known.
    """
    if named := request.code or running.origin.folder or _folder_of(running):
        return Path(named)
    raise ConfigError("the folder of the job's code is not known: name it as code, in addition to git")


def script_in(snapshot: CodeSnapshot, folder: Path, script: str) -> str:
    """Return the path of a script in a snapshot.

    Args:
        snapshot: The snapshot of the folder.
        folder: The absolute path of the folder.
        script: The path of the script, relative to the folder, or an absolute path within it.

    Raises:
        ConfigError: the script is not in the snapshot.
    """
    inner = os.path.normpath(script)
    if os.path.isabs(inner):  # noqa: PTH117 - text, not a path of this machine alone
        inner = os.path.relpath(inner, folder)
    if inner.startswith("../") or inner == "..":
        raise ConfigError(
            f"the script {script} is not in the folder {folder}: name a folder that has "
            "both the script and the files that it imports"
        )
    names = {file.path for file in snapshot.files}
    if inner in names or _by_links(folder, inner) in names:
        return inner
    near = difflib.get_close_matches(inner, sorted(names), n=1)
    hint = (
        f"did you mean {near[0]}?" if near else "if git ignores it, remove it from .gitignore, or name another script"
    )
    raise ConfigError(f"the script {inner} is not among the files of {folder}: {hint}")


def _by_links(folder: Path, inner: str) -> str:
    """Return the path of a file after all links in it are followed; both paths are relative to the folder."""
    return os.path.relpath(os.path.realpath(folder / inner), os.path.realpath(folder))


def _snapshot(folder: Path, revision: str, progress: SnapshotProgress | None) -> CodeSnapshot:
    return revision_snapshot(folder, revision, progress) if revision else folder_snapshot(folder, progress)


def _script_of(running: CodeVersion, folder: Path) -> str:
    """Return the path of the running script. If the script runs in place in another folder, return only its name."""
    if running.code or Path(running.script).is_relative_to(folder):
        return running.script
    return Path(running.script).name


def _folder_of(version: CodeVersion) -> str:
    """Return the folder of a version that runs in place; empty: the version does not."""
    return "" if version.code else str(Path(version.script).parent)


async def _other_script(running: CodeVersion, script: str, store: VersionStore | None) -> str:
    if not running.code:
        if not script.startswith("/"):
            raise ConfigError(f"the job runs in place: give the absolute path of the script instead of {script}")
        return script
    if store is None:
        raise ConfigError(NO_STORE)
    inner = posixpath.normpath(script)
    with await store.code(running.code) as code:
        names = {file.path for file in code.files}
    if inner not in names:
        near = difflib.get_close_matches(inner, sorted(names), n=1)
        raise ConfigError(f"the running code has no {script}" + (f": did you mean {near[0]}?" if near else ""))
    return inner


def _commits(before: CodeVersion, after: CodeVersion) -> str:
    folder = Path(after.origin.folder or "/")
    if not (before.origin.commit and after.origin.commit and folder.is_dir() and work_tree_of(folder)):
        return ""
    try:
        return GitFolder(folder).between(before.origin.commit, after.origin.commit)
    except ConfigError:
        return ""


async def _on_storage(work: Callable[[], T], folder: str) -> T:
    """Read a folder in a thread, which is abandoned if the storage hangs."""
    try:
        return await _threads.do(work, STORAGE_S)
    except TimeoutError:
        raise ConfigError(f"{folder} has not answered for {STORAGE_S:g} s: check its storage") from None
    except OSError as error:
        raise ConfigError(f"{folder} cannot be read: {error}") from error
