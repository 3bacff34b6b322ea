"""The store of versions: a folder beside the ledger, or any fsspec URL, which workers and commands share.

::

    code/<digest>.tar.gz                    a snapshot (everstep/system/code_archive.py)
    jobs/<job>/<id>.<digest|in-place>.json  what one version runs (everstep/model/version.py, CodeVersion)

A file is either complete or does not exist, and code is verified by its digest at each read. Two writers of the same
version write equal files, so no lock is needed. The access to storage that hangs is abandoned after a time limit.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import BinaryIO, TypeVar, cast

import structlog

from activities.versions.snapshot import CodeSnapshot
from agent.checkpoints.tiers.remote_folder import RemoteFolder
from agent.state.reads import Reads
from everstep.base.text import one_line
from everstep.decisions.act.versions.prune import Prunable, StoredVersion, prunable
from everstep.errors import AgentError, DamagedCode, EverstepError, VersionStoreError
from everstep.model.version import NAME_CHARACTERS, CodeVersion
from everstep.rank.environment import VERSIONS
from everstep.system import private_files as private
from everstep.system.code_archive import DIGEST, MAX_BYTES, MAX_FILES, PIECE, CodeFile, digest_of, read_archive

ANSWER_S = 60.0
"""The time limit of a small read or write, seconds."""
SLOWEST_BYTES = 1_000_000
"""Storage is expected to be at least this fast, bytes per second."""
PRUNE_S = 30.0
"""The time limit for the removal of unneeded files, seconds."""
MOST_BYTES = MAX_BYTES + MAX_FILES * 4096
"""The largest size of an archive, bytes."""
IN_PLACE, ARCHIVE, RECORD = "in-place", ".tar.gz", ".json"

T = TypeVar("T")
log = structlog.get_logger("versions")


class StoredCode:
    """A snapshot that was read from the store and verified by its digest; a context manager.

    Args:
        digest: The digest of the snapshot.
        files: The files in the snapshot.
        archive: The archive, an open file of this process.
        size: The size of the archive, bytes.
    """

    def __init__(self, digest: str, files: list[CodeFile], archive: BinaryIO, size: int) -> None:
        self.digest, self.files, self.size = digest, files, size
        self._archive = archive

    def read(self, take: Callable[[CodeFile, bytes], None]) -> None:
        """Pass each file and its contents to ``take``."""
        self._archive.seek(0)
        read_archive(self._archive, take)

    def pieces(self) -> Iterator[bytes]:
        """Yield the archive in pieces; several callers may read it at the same time."""
        descriptor = self._archive.fileno()
        for at in range(0, self.size, PIECE):
            yield os.pread(descriptor, PIECE, at)

    def close(self) -> None:
        """Close the archive."""
        self._archive.close()

    def __enter__(self) -> StoredCode:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class VersionStore:
    """The store. All methods may raise VersionStoreError, e.g. if the storage hangs or is full.

    Args:
        url: A folder, or an fsspec URL such as ``s3://bucket/versions``.

    Raises:
        ConfigError: the URL's protocol is unknown, or its driver is not installed.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._code = RemoteFolder(url, "code", VERSIONS)
        self._jobs = RemoteFolder(url, "jobs", VERSIONS)
        self._reads = Reads()

    async def put(self, job: str, version: CodeVersion, snapshot: CodeSnapshot | None) -> None:
        """Store a version of a job.

        Args:
            job: The name of the job.
            version: The version.
            snapshot: The version's code; None: the version runs in place, or the store has the code already.
        """
        await self._do(self._make_folder, "be made")
        if snapshot is not None:
            action = f"keep the code {_short(version.code)}"
            await self._do(lambda: self._put_code(snapshot), action, snapshot.archive_bytes)
        data = version.model_dump_json(indent=1).encode()
        await self._do(lambda: self._jobs.write(data, _record(job, version)), f"keep a version of {job}")

    async def code(self, digest: str) -> StoredCode:
        """Read a snapshot.

        Raises:
            VersionStoreError: the snapshot is missing or damaged.
        """
        if not DIGEST.fullmatch(digest):
            raise VersionStoreError(f"{digest!r} is no digest of code")
        return await self._do(lambda: self._read_code(digest), f"read the code {_short(digest)}", MOST_BYTES)

    async def full(self, job: str, version: CodeVersion) -> CodeVersion:
        """Return a version with all data of its record, e.g. its origin; a version without a record is returned
        unchanged."""
        name = _record(job, version)
        found = await self._do(lambda: self._jobs.read([name]), f"read a version of {job}")
        if name not in found:
            return version
        return self._read(name, found[name])

    async def versions(self, job: str, beginning: str) -> list[CodeVersion]:
        """Return a job's versions whose ids have a prefix, from their records; the first damaged record raises an
        error."""
        action = f"read the versions of {job}"
        names = await self._do(lambda: self._named(job, beginning), action)
        found = await self._do(lambda: self._jobs.read(names), action)
        return [self._read(name, data) for name, data in sorted(found.items())]

    async def keep(self, job: str, version: CodeVersion) -> None:
        """Keep a stored version: its record and code stay for at least a day from now (``prune.YOUNG_S``).

        Raises:
            VersionStoreError: its code was removed, or is damaged.
        """
        await self.put(job, version, None)  # before the check: the new record protects the code from removal
        (await self.code(version.code)).close()

    async def prune(self, job: str, needed: Collection[str]) -> Prunable:
        """Remove the files that no job needs any more; returns what was removed. Errors are only logged.

        Args:
            job: The job whose versions are checked.
            needed: The ids of the job's versions that must stay.
        """
        try:
            return await self._do(lambda: self._prune(job, needed), "remove unneeded versions", limit_s=PRUNE_S)
        except VersionStoreError as error:
            log.warning("unneeded versions are not removed", reason=str(error))
            return Prunable([], [])

    def _read(self, name: str, data: bytes) -> CodeVersion:
        """Return a record's version; its id must agree with the record's name."""
        try:
            kept = CodeVersion.model_validate_json(data)
            if kept.id != name.rpartition("/")[2].partition(".")[0]:
                raise ValueError("its content is another version")
            return kept
        except ValueError as error:
            raise VersionStoreError(f"the record {name} in {self.url}/jobs is damaged: {one_line(error)}") from error

    async def _do(self, work: Callable[[], T], action: str, size: int = 0, limit_s: float = 0.0) -> T:
        """Run a storage access in a thread, which is abandoned if the storage hangs."""
        limit_s = (limit_s or ANSWER_S) + size / SLOWEST_BYTES
        where = f"the store of versions {self.url} cannot {action}"
        try:
            return await self._reads.do(work, limit_s)
        except TimeoutError:
            raise VersionStoreError(
                f"{where}: it has not answered for {limit_s:.0f} s. Check that storage, or start the job in place"
            ) from None
        except AgentError as error:
            raise VersionStoreError(f"{where}: {error}") from error
        except EverstepError:
            raise
        except Exception as error:  # a storage driver may raise any error
            raise VersionStoreError(
                f"{where}: {type(error).__name__}: {one_line(error)}. Check that storage, or name another store "
                f"({VERSIONS})"
            ) from error

    # These methods run in threads.

    def _named(self, job: str, beginning: str) -> list[str]:
        """Return the names of a job's records whose ids have a prefix."""
        own = RemoteFolder(f"{self.url}/jobs", job, VERSIONS)
        return [f"{job}/{name}" for name in own.sizes() if name.startswith(beginning) and name.endswith(RECORD)]

    def _make_folder(self) -> None:
        """Make the folder for this user only; the rights of an existing folder are not changed."""
        folder = _local(self.url)
        if folder is not None and not folder.exists():
            private.make_folder(folder)

    def _put_code(self, snapshot: CodeSnapshot) -> None:
        """Write the code even if the store has it: the new file is certainly complete, and too young to be removed by
        another worker."""
        with tempfile.NamedTemporaryFile(prefix="everstep-code-") as local:
            snapshot.archive.seek(0)
            while data := snapshot.archive.read(PIECE):
                local.write(data)
            local.flush()
            self._code.put(Path(local.name), snapshot.digest + ARCHIVE, lambda _: None)

    def _read_code(self, digest: str) -> StoredCode:
        archive = cast(BinaryIO, tempfile.TemporaryFile(prefix="everstep-code-"))  # noqa: SIM115
        try:
            size = self._copied(digest, archive)
            archive.seek(0)
            files = read_archive(archive)
            if (found := digest_of(files)) != digest:
                raise DamagedCode(f"it contains the code {_short(found)}")
        except FileNotFoundError:
            archive.close()
            raise VersionStoreError(
                f"the code {_short(digest)} is not in the store of versions {self.url}: it was removed, or the "
                "workers and the command use different stores"
            ) from None
        except DamagedCode as error:
            archive.close()
            raise VersionStoreError(
                f"the code {_short(digest)} in the store of versions {self.url} is damaged: {error}. "
                "Request the version again, from its folder or revision"
            ) from error
        except BaseException:
            archive.close()
            raise
        return StoredCode(digest, files, archive, size)

    def _copied(self, digest: str, archive: BinaryIO) -> int:
        """Copy an archive from the store; returns its size, bytes."""
        buffer = memoryview(bytearray(PIECE))
        size = 0
        with self._code.reading(digest + ARCHIVE) as read:
            while count := read(size, buffer):
                archive.write(buffer[:count])
                size += count
                if size > MOST_BYTES:
                    raise DamagedCode(f"it has more than {MOST_BYTES} bytes")
        return size

    def _prune(self, job: str, needed: Collection[str]) -> Prunable:
        now_s = time.time()
        records = [found for name, age_s in self._jobs.ages(now_s).items() if (found := _stored(name, age_s))]
        code = {
            digest: age_s
            for name, age_s in self._code.ages(now_s).items()
            if DIGEST.fullmatch(digest := name.removesuffix(ARCHIVE))
        }
        unneeded = prunable(records, code, job=job, needed=needed)
        for version in unneeded.versions:
            self._jobs.remove(f"{version.job}/{version.id}.{version.code or IN_PLACE}{RECORD}")
        for digest in unneeded.code:
            self._code.remove(digest + ARCHIVE)
        if unneeded.versions or unneeded.code:
            log.info(
                "removed unneeded versions", job=job, versions=len(unneeded.versions), snapshots=len(unneeded.code)
            )
        return unneeded


def _record(job: str, version: CodeVersion) -> str:
    """Return the name of a record. The name contains the digest of the code, so pruning need not read the records."""
    return f"{job}/{version.id}.{version.code or IN_PLACE}{RECORD}"


def _stored(name: str, age_s: float) -> StoredVersion | None:
    """Return a record by its file name; None: the file is not a record."""
    job, _, file = name.partition("/")
    identifier, _, code = file.removesuffix(RECORD).partition(".")
    if not file.endswith(RECORD) or not code:
        return None
    return StoredVersion(job, identifier, "" if code == IN_PLACE else code, age_s)


def _short(digest: str) -> str:
    return digest[:NAME_CHARACTERS]


def _local(url: str) -> Path | None:
    """Return the folder that a URL names; None: the URL is not local."""
    path = url.removeprefix("file://")
    return None if "://" in path else Path(path)
