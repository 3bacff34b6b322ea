"""This module is the cache of snapshots of code on this machine, in the agent's state folder.

::

    code/<digest>/          the files of a snapshot, which must not be changed
    code/<digest>.json      its index; it is written last, and a folder without an index is not used
    code/.coming-…          a snapshot that is being received or unpacked
    code/.going-…           a snapshot that is being removed

A snapshot is verified by its digest when it arrives. Later, a comparison of sizes and times with the index shows
whether a file was changed or removed; this takes two microseconds per file. Added files are allowed, because Python
compiles modules beside their sources, and scripts may write there too.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import io
import json
import os
import shutil
import stat
import threading
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Set
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import structlog

from agent.state.reads import Reads
from agent.v1 import agent_pb2 as pb
from everstep.errors import AgentError, CodeMissing, ConfigError, DamagedCode
from everstep.system import private_files as private
from everstep.system.code_archive import DIGEST, MAX_BYTES, MAX_FILES, CodeFile, digest_of, unpack

FOLDER = "code"
"""Name of the cache's folder in the state folder."""
KEPT = 20
"""If there are more snapshots than this, the least recently used snapshots are removed."""
KEPT_BYTES = 2_000_000_000
"""If all snapshots together are larger than this, the least recently used snapshots are removed, bytes."""
MOST_BYTES = MAX_BYTES + MAX_FILES * 4096
"""The size of the largest archive that is accepted, bytes; the largest snapshot needs less."""
IN_MEMORY = 1 << 20
"""An archive up to this size is kept in memory until it is unpacked, bytes."""
CHUNK_PATIENCE_S = 30.0
"""The longest time between two chunks of a snapshot, seconds."""
LOOK_PATIENCE_S = 5.0
"""The longest time that the disk may take to compare a snapshot with its index, seconds."""

COMING, GOING = ".coming-", ".going-"

logger = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class FileSeen:
    """A file of a snapshot, with its size and times after the snapshot was unpacked."""

    path: str
    kind: str
    size: int
    mtime_ns: int
    ctime_ns: int
    """Every change of the file changes this time, and no program can set it."""

    @classmethod
    def of(cls, folder: Path, path: str, kind: str) -> FileSeen:
        """Read the current size and times of a file; raises OSError."""
        now = (folder / path).lstat()
        if (stat.S_ISLNK(now.st_mode), now.st_uid) != (kind == "l", os.geteuid()):
            raise FileNotFoundError(errno.ENOENT, "another file is there", path)
        return cls(path, kind, now.st_size, now.st_mtime_ns, now.st_ctime_ns)


@dataclass(slots=True)
class CodeCache:
    """The cache of one agent. No method waits for a disk in the event loop.

    Args:
        folder: Folder of the cache; it is made when it is needed.
        reads: Runs the work that may hang.
        machine: Name of this machine, for messages.
    """

    folder: Path
    reads: Reads
    machine: str
    in_use: Callable[[], Set[str]] = frozenset
    """Returns the digests that jobs on this machine run: they are kept."""
    bytes: int = 0
    """The bytes of all snapshots, as they were last counted."""
    snapshots: int = 0
    _pinned: Counter[str] = field(default_factory=Counter)
    """Digest → the number of ``kept`` contexts. Only the event loop changes it; threads only look up single digests."""
    _turns: dict[str, asyncio.Lock] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    """Held by the thread that makes, removes or counts snapshots."""
    _token: str = field(default_factory=lambda: uuid.uuid4().hex)
    """A part of the names of this agent's unfinished folders."""

    async def recover(self) -> None:
        """Remove the unfinished folders of an agent that was killed."""
        await self.reads.do(self._sweep)

    async def has(self, digests: Iterable[str]) -> list[str]:
        """Return which of the named snapshots are here and unchanged, by the sizes and times of their files."""
        wanted = [digest for digest in digests if DIGEST.fullmatch(digest)]
        return await self.reads.do(lambda: [digest for digest in wanted if self._is_unchanged(digest)])

    async def put(self, chunks: AsyncIterator[pb.CodeChunk]) -> pb.PutCodeReply:
        """Receive a snapshot; an incomplete snapshot is never used.

        Raises:
            ConfigError: the first chunk does not announce a snapshot.
            DamagedCode: the archive differs from the announced one.
            AgentError: the disk has no room, or no further chunk arrived in time.
        """
        began = time.monotonic()
        first = await _next(chunks)
        if first is None or not DIGEST.fullmatch(first.digest):
            raise ConfigError("the first chunk must have the snapshot's digest, 64 hexadecimal digits")
        if not 0 < first.bytes <= MOST_BYTES:
            raise ConfigError(f"an archive of {first.bytes} bytes is too large for code: the limit is {MOST_BYTES}")
        digest = first.digest
        with self.kept(digest):
            if await self.has([digest]):
                return pb.PutCodeReply(reused=True)
            coming = self.folder / f"{COMING}{self._token}-{uuid.uuid4().hex}"
            over = False
            try:
                small = await self._received(first, chunks, coming)
                async with self._turns.setdefault(digest, asyncio.Lock()):
                    unpacked = await self.reads.do(partial(self._unpack_once, small, coming, digest))
                    over = True
                    if unpacked is None:
                        return pb.PutCodeReply(reused=True)  # another caller has sent it meanwhile
            except OSError as error:
                raise AgentError(
                    f"{self.machine} cannot keep the code: {error.strerror or error} ({self.folder})"
                ) from error
            finally:
                if not over:
                    await self.reads.do(partial(shutil.rmtree, coming, ignore_errors=True))
        seconds = time.monotonic() - began
        logger.info("received code", digest=digest, bytes=unpacked, seconds=round(seconds, 3))
        return pb.PutCodeReply(bytes=unpacked, seconds=seconds)

    async def script(self, digest: str, script: str, *, verified: bool = False) -> Path:
        """Return the path of a script in a snapshot.

        Args:
            digest: Digest of the snapshot.
            script: Relative path of the script in the snapshot.
            verified: Read all files and compare them with the digest; a damaged snapshot is removed.

        Raises:
            CodeMissing: the snapshot is not here, or is damaged: the caller must send it.
            ConfigError: the snapshot has no such script.
        """
        if not DIGEST.fullmatch(digest):
            raise ConfigError(f"{digest!r} is not a digest of code")
        if Path(script).is_absolute() or ".." in Path(script).parts:
            raise ConfigError(f"script {script} is not a path within a snapshot of code")
        path = self.folder / digest / script
        try:
            check, patience_s = (self._is_intact, None) if verified else (self._is_unchanged, LOOK_PATIENCE_S)
            is_good, has_script = await self.reads.do(lambda: (check(digest), path.is_file()), patience_s)
        except TimeoutError:
            logger.error("the disk does not answer whether code is unchanged", digest=digest)
            return path
        if not is_good:
            raise CodeMissing(f"{self.machine} does not have the code {digest[:12]}, or its copy is damaged")
        if not has_script:
            raise ConfigError(f"script {script} is not in the code {digest[:12]}")
        return path

    @contextlib.contextmanager
    def kept(self, digest: str) -> Iterator[None]:
        """Prevent the removal of a snapshot during the context."""
        self._pinned[digest] += 1
        try:
            yield
        finally:
            self._pinned[digest] -= 1
            if not self._pinned[digest]:
                del self._pinned[digest]

    async def _received(
        self, first: pb.CodeChunk, chunks: AsyncIterator[pb.CodeChunk], coming: Path
    ) -> bytearray | None:
        """Receive an archive. A small archive is returned; a larger archive is written to a file."""
        chunk: pb.CodeChunk | None = first
        if first.bytes <= IN_MEMORY:
            archive = bytearray(first.data)
            while len(archive) <= first.bytes and (chunk := await _next(chunks)) is not None:
                archive += chunk.data
            self._check_size(len(archive), first.bytes)
            return archive
        await self.reads.do(lambda: private.make_folder(private.make_folder(self.folder) / coming.name))
        received = 0
        file = await self.reads.do(lambda: open(coming / "archive", "xb", opener=private.open_file))  # noqa: SIM115
        try:
            while chunk is not None:
                received += len(chunk.data)
                if received > first.bytes:
                    break
                await self.reads.do(partial(file.write, chunk.data))
                chunk = await _next(chunks)
        finally:
            await self.reads.do(file.close)
        self._check_size(received, first.bytes)
        return None

    def _check_size(self, received: int, announced: int) -> None:
        if received != announced:
            raise DamagedCode(f"{self.machine} received {received} bytes of the archive, not the announced {announced}")

    # In threads.

    def _unpack_once(self, small: bytearray | None, coming: Path, digest: str) -> int | None:
        """Unpack an archive unless its snapshot is here already; returns the bytes of all files, or None if it is here.

        Args:
            small: The archive; None: it is a file in ``coming``.
            coming: A temporary folder, which is removed afterwards.
            digest: Digest of the snapshot.
        """
        try:
            return None if self._is_unchanged(digest) else self._unpack(small, coming, digest)
        finally:
            shutil.rmtree(coming, ignore_errors=True)

    def _unpack(self, small: bytearray | None, coming: Path, digest: str) -> int:
        private.make_folder(private.make_folder(self.folder) / coming.name)
        with io.BytesIO(small) if small is not None else (coming / "archive").open("rb") as archive:
            files = unpack(archive, coming / "tree", digest)
        rows = [FileSeen.of(coming / "tree", file.path, file.kind) for file in files]
        index = [[row.path, row.kind, row.size, row.mtime_ns, row.ctime_ns] for row in rows]
        with self._lock:
            self._remove(digest)  # the remains of an earlier, damaged copy
            (coming / "tree").rename(self.folder / digest)
            private.replace(self._index(digest), json.dumps({"digest": digest, "files": index}))
            self._prune()
        return sum(file.bytes for file in files)

    def _is_unchanged(self, digest: str) -> bool:
        """Return whether a snapshot is here and none of its files was changed or removed. If so, it counts as used."""
        rows = self._rows(digest)
        if rows is None:
            return False
        folder = self.folder / digest
        try:
            for row in rows:
                if FileSeen.of(folder, row.path, row.kind) != row:
                    raise FileNotFoundError(errno.ENOENT, "the file was changed", row.path)
        except OSError as error:
            logger.warning("code is damaged and is not used", digest=digest, reason=str(error))
            return False
        with contextlib.suppress(OSError):
            os.utime(self._index(digest))
        return True

    def _is_intact(self, digest: str) -> bool:
        """Return whether a snapshot is unchanged and its contents match its digest; a damaged one is removed."""
        rows, folder = self._rows(digest), self.folder / digest
        if rows is None or not self._is_unchanged(digest):
            return False
        files = []
        with contextlib.suppress(OSError):
            for row in rows:
                path = folder / row.path
                contents = str(path.readlink()).encode() if row.kind == "l" else path.read_bytes()
                files.append(CodeFile(row.path, row.kind, hashlib.sha256(contents).hexdigest()))
        if digest_of(files) == digest:
            return True
        logger.warning("removing damaged code", digest=digest)
        with self._lock:
            self._remove(digest)
        return False

    def _rows(self, digest: str) -> list[FileSeen] | None:
        """Return the index of a snapshot; None: there is none."""
        try:
            index = json.loads(self._index(digest).read_bytes())
            return [FileSeen(*row) for row in index["files"]] if index["digest"] == digest else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _prune(self) -> None:
        """Remove the least recently used snapshots until the others are within the limits."""
        snapshots = []
        for index in self.folder.glob("*.json"):
            with contextlib.suppress(OSError):
                digest = index.stem
                size = sum(row.size for row in self._rows(digest) or [])
                snapshots.append((index.stat().st_mtime_ns, digest, size))
        in_use = self.in_use()
        self.snapshots, self.bytes = len(snapshots), sum(size for *_, size in snapshots)
        for _, digest, size in sorted(snapshots):
            if self.snapshots <= KEPT and self.bytes <= KEPT_BYTES:
                break
            if digest not in in_use and digest not in self._pinned:
                logger.info("removing the least recently used code", digest=digest, bytes=size)
                self._remove(digest)
                self.snapshots, self.bytes = self.snapshots - 1, self.bytes - size

    def _sweep(self) -> None:
        with self._lock, contextlib.suppress(FileNotFoundError):
            for path in list(self.folder.iterdir()):
                if path.name.startswith((COMING, GOING)):
                    if self._token not in path.name:
                        shutil.rmtree(path, ignore_errors=True)
                elif not self._index(path.stem).exists() or not (self.folder / path.stem).is_dir():
                    self._remove(path.stem)
            self._prune()

    def _remove(self, digest: str) -> None:
        """Remove a snapshot; its index is removed first, so that no incomplete snapshot is ever used."""
        self._index(digest).unlink(missing_ok=True)
        going = self.folder / f"{GOING}{uuid.uuid4().hex}"
        with contextlib.suppress(FileNotFoundError):
            (self.folder / digest).rename(going)
            shutil.rmtree(going, ignore_errors=True)

    def _index(self, digest: str) -> Path:
        return self.folder / f"{digest}.json"


async def _next(chunks: AsyncIterator[pb.CodeChunk]) -> pb.CodeChunk | None:
    """Return the next chunk; None: there is no further chunk.

    Raises:
        AgentError: no chunk arrived in time.
    """
    try:
        async with asyncio.timeout(CHUNK_PATIENCE_S):
            return await anext(chunks, None)
    except TimeoutError:
        raise AgentError(f"no further chunk of the archive arrived within {CHUNK_PATIENCE_S:g} s") from None
