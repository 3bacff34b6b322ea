"""The store of versions: a folder beside the ledger, or any fsspec URL, that workers and commands share.

::

    code/<digest>.tar.gz                    a snapshot (everstep/system/code_archive.py)
    jobs/<job>/<id>.<digest|in-place>.json  what one version runs (everstep/model/version.py, CodeVersion)

Files are there whole or not at all, and code is verified by its digest wherever it is read. Whoever writes the same
writes the same file: nobody need take turns. Storage that hangs is left to itself after a while.
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
"""A store that has not answered by then does not, seconds."""
SLOWEST_BYTES = 1_000_000
"""Bytes a second of a store; one that is slower does not answer."""
PRUNE_S = 30.0
"""Nobody waits longer for what is not needed any more to be removed, seconds."""
MOST_BYTES = MAX_BYTES + MAX_FILES * 4096
"""Of an archive."""
IN_PLACE, ARCHIVE, RECORD = "in-place", ".tar.gz", ".json"

T = TypeVar("T")
log = structlog.get_logger("versions")


class StoredCode:
    """A snapshot that was read from the store, and is what its digest says; a context manager.

    Args:
        digest: Its own.
        files: What it holds.
        archive: A file of this process.
        size: Bytes of the archive.
    """

    def __init__(self, digest: str, files: list[CodeFile], archive: BinaryIO, size: int) -> None:
        self.digest, self.files, self.size = digest, files, size
        self._archive = archive

    def read(self, take: Callable[[CodeFile, bytes], None]) -> None:
        """Hand each file and its contents to ``take``."""
        self._archive.seek(0)
        read_archive(self._archive, take)

    def pieces(self) -> Iterator[bytes]:
        """The archive, in pieces; several may read it at a time."""
        descriptor = self._archive.fileno()
        for at in range(0, self.size, PIECE):
            yield os.pread(descriptor, PIECE, at)

    def close(self) -> None:
        """It is not read any more."""
        self._archive.close()

    def __enter__(self) -> StoredCode:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class VersionStore:
    """All methods may raise VersionStoreError: it does not answer, or is full; the message says where and what to do.

    Args:
        url: A folder, or an fsspec URL such as ``s3://bucket/versions``.

    Raises:
        ConfigError: nobody knows the URL's protocol, or its driver is not installed.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._code = RemoteFolder(url, "code", VERSIONS)
        self._jobs = RemoteFolder(url, "jobs", VERSIONS)
        self._reads = Reads()

    async def put(self, job: str, version: CodeVersion, snapshot: CodeSnapshot | None) -> None:
        """Keep a version of a job.

        Args:
            job: Its name.
            version: What it runs.
            snapshot: Its code; None: it has none, or the store has it already.
        """
        await self._do(self._make_folder, "be made")
        if snapshot is not None:
            what = f"keep the code {_short(version.code)}"
            await self._do(lambda: self._put_code(snapshot), what, snapshot.archive_bytes)
        data = version.model_dump_json(indent=1).encode()
        await self._do(lambda: self._jobs.write(data, _record(job, version)), f"keep a version of {job}")

    async def code(self, digest: str) -> StoredCode:
        """Read a snapshot.

        Raises:
            VersionStoreError: it is not there, or is damaged.
        """
        if not DIGEST.fullmatch(digest):
            raise VersionStoreError(f"{digest!r} is no digest of code")
        return await self._do(lambda: self._read_code(digest), f"read the code {_short(digest)}", MOST_BYTES)

    async def full(self, job: str, version: CodeVersion) -> CodeVersion:
        """A version with all that its record says of it, e.g. where it came from; itself where there is no record."""
        name = _record(job, version)
        found = await self._do(lambda: self._jobs.read([name]), f"read a version of {job}")
        if name not in found:
            return version
        return self._read(name, found[name])

    async def versions(self, job: str, beginning: str) -> list[CodeVersion]:
        """The versions of a job whose ids begin so, as their records say; of damaged ones the first is told."""
        what = f"read the versions of {job}"
        names = await self._do(lambda: self._named(job, beginning), what)
        found = await self._do(lambda: self._jobs.read(names), what)
        return [self._read(name, data) for name, data in sorted(found.items())]

    async def keep(self, job: str, version: CodeVersion) -> None:
        """Keep a version that is here: it and its code are not removed within a day.

        Raises:
            VersionStoreError: its code is not here any more, or is damaged.
        """
        await self.put(job, version, None)  # first: code that a record names stays
        (await self.code(version.code)).close()

    async def prune(self, job: str, needed: Collection[str]) -> Prunable:
        """Remove what this job and all others need no longer. It is not waited for, and its errors are only logged.

        Args:
            job: Whose versions are looked at.
            needed: Ids of its versions that have to stay.
        """
        try:
            return await self._do(lambda: self._prune(job, needed), "remove what is not needed", limit_s=PRUNE_S)
        except VersionStoreError as error:
            log.warning("versions that are not needed stay", reason=str(error))
            return Prunable([], [])

    def _read(self, name: str, data: bytes) -> CodeVersion:
        """What a record says, which is what its name says."""
        try:
            kept = CodeVersion.model_validate_json(data)
            if kept.id != name.rpartition("/")[2].partition(".")[0]:
                raise ValueError("it is of another version")
            return kept
        except ValueError as error:
            raise VersionStoreError(f"the record {name} in {self.url}/jobs is damaged: {one_line(error)}") from error

    async def _do(self, work: Callable[[], T], what: str, size: int = 0, limit_s: float = 0.0) -> T:
        """Do what may hang, in a thread that is left to itself then."""
        limit_s = (limit_s or ANSWER_S) + size / SLOWEST_BYTES
        where = f"the store of versions {self.url} cannot {what}"
        try:
            return await self._reads.do(work, limit_s)
        except TimeoutError:
            raise VersionStoreError(
                f"{where}: it has not answered for {limit_s:.0f} s. Look at that storage, or start the job in place"
            ) from None
        except AgentError as error:
            raise VersionStoreError(f"{where}: {error}") from error
        except EverstepError:
            raise
        except Exception as error:  # drivers raise what they like
            raise VersionStoreError(
                f"{where}: {type(error).__name__}: {one_line(error)}. Look at that storage, or name another one "
                f"({VERSIONS})"
            ) from error

    # In threads.

    def _named(self, job: str, beginning: str) -> list[str]:
        """The names of a job's records whose ids begin so."""
        own = RemoteFolder(f"{self.url}/jobs", job, VERSIONS)
        return [f"{job}/{name}" for name in own.sizes() if name.startswith(beginning) and name.endswith(RECORD)]

    def _make_folder(self) -> None:
        """A folder that we make is ours alone; of another one its owner says who may look into it."""
        folder = _local(self.url)
        if folder is not None and not folder.exists():
            private.make_folder(folder)

    def _put_code(self, snapshot: CodeSnapshot) -> None:
        """Written anew each time: so it is whole whatever was there, and young, and nobody removes it meanwhile."""
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
                raise DamagedCode(f"it holds {_short(found)}")
        except FileNotFoundError:
            archive.close()
            raise VersionStoreError(
                f"the code {_short(digest)} is not in the store of versions {self.url}: was it removed, or do the "
                "workers and the command have different ones?"
            ) from None
        except DamagedCode as error:
            archive.close()
            raise VersionStoreError(
                f"the code {_short(digest)} in the store of versions {self.url} is damaged: {error}. "
                "Ask for the version again, from its folder or revision"
            ) from error
        except BaseException:
            archive.close()
            raise
        return StoredCode(digest, files, archive, size)

    def _copied(self, digest: str, archive: BinaryIO) -> int:
        """Copy an archive here; returns its bytes."""
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
        going = prunable(records, code, job=job, needed=needed)
        for version in going.versions:
            self._jobs.remove(f"{version.job}/{version.id}.{version.code or IN_PLACE}{RECORD}")
        for digest in going.code:
            self._code.remove(digest + ARCHIVE)
        if going.versions or going.code:
            log.info("removed what is not needed", job=job, versions=len(going.versions), snapshots=len(going.code))
        return going


def _record(job: str, version: CodeVersion) -> str:
    """The name of a record says which code it needs: whoever prunes need not read them all."""
    return f"{job}/{version.id}.{version.code or IN_PLACE}{RECORD}"


def _stored(name: str, age_s: float) -> StoredVersion | None:
    """A record by its name; None: it is none."""
    job, _, file = name.partition("/")
    identifier, _, code = file.removesuffix(RECORD).partition(".")
    if not file.endswith(RECORD) or not code:
        return None
    return StoredVersion(job, identifier, "" if code == IN_PLACE else code, age_s)


def _short(digest: str) -> str:
    return digest[:NAME_CHARACTERS]


def _local(url: str) -> Path | None:
    """The folder that a URL names; None: it is elsewhere."""
    path = url.removeprefix("file://")
    return None if "://" in path else Path(path)
