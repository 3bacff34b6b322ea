"""The snapshots of code that this machine has: a cache in the agent's state folder.

::

    code/<digest>/          the files of a snapshot; they are not to be changed
    code/<digest>.json      its index, written last: without it the folder is no snapshot
    code/.coming-…          a snapshot that is received or unpacked now
    code/.going-…           a snapshot that is removed now

A snapshot is verified by its digest when it arrives. Later a comparison with its index shows cheaply whether a file was
changed or is gone: size and times of each, two microseconds a file. Added files do not count: Python compiles modules
beside their sources, and scripts may write there too.
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
"""In the state folder."""
KEPT = 20
"""Snapshots that are kept; of more the least recently used ones are removed."""
KEPT_BYTES = 2_000_000_000
"""Bytes of all their files that are kept."""
MOST_BYTES = MAX_BYTES + MAX_FILES * 4096
"""Bytes of the largest archive that is accepted: more than the largest snapshot needs."""
IN_MEMORY = 1 << 20
"""Bytes of an archive that is unpacked without being written first."""
CHUNK_PATIENCE_S = 30.0
"""A sender of a snapshot that is silent for this long is dropped, seconds."""
LOOK_PATIENCE_S = 5.0
"""A disk has this long to show whether a snapshot is complete, seconds."""

COMING, GOING = ".coming-", ".going-"

logger = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class FileSeen:
    """A file as it was when its snapshot had been unpacked."""

    path: str
    kind: str
    size: int
    mtime_ns: int
    ctime_ns: int
    """Every change moves it, and no program can set it back."""

    @classmethod
    def of(cls, folder: Path, path: str, kind: str) -> FileSeen:
        """The file as it is now; raises OSError."""
        now = (folder / path).lstat()
        if (stat.S_ISLNK(now.st_mode), now.st_uid) != (kind == "l", os.geteuid()):
            raise FileNotFoundError(errno.ENOENT, "another file is there", path)
        return cls(path, kind, now.st_size, now.st_mtime_ns, now.st_ctime_ns)


@dataclass(slots=True)
class CodeCache:
    """The cache of one agent. No method waits for a disk in the event loop.

    Args:
        folder: It is made when it is needed.
        reads: Runs the work that may hang.
        machine: Its name, for messages.
    """

    folder: Path
    reads: Reads
    machine: str
    in_use: Callable[[], Set[str]] = frozenset
    """Returns the digests that jobs on this machine run: they are kept."""
    bytes: int = 0
    """Bytes of all snapshots, when they were counted last."""
    snapshots: int = 0
    _pinned: Counter[str] = field(default_factory=Counter)
    """Digest → how many need it now. The event loop changes it; threads only look digests up, and never iterate."""
    _turns: dict[str, asyncio.Lock] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    """Held by the thread that makes, removes or counts snapshots."""
    _token: str = field(default_factory=lambda: uuid.uuid4().hex)
    """In the names of this agent's unfinished folders."""

    async def recover(self) -> None:
        """Remove the unfinished folders of an agent that was killed."""
        await self.reads.do(self._sweep)

    async def has(self, digests: Iterable[str]) -> list[str]:
        """Which of some snapshots are here, complete as far as their files' sizes and times show."""
        wanted = [digest for digest in digests if DIGEST.fullmatch(digest)]
        return await self.reads.do(lambda: [digest for digest in wanted if self._is_whole(digest)])

    async def put(self, chunks: AsyncIterator[pb.CodeChunk]) -> pb.PutCodeReply:
        """Receive a snapshot; it is here complete, or not at all.

        Raises:
            ConfigError: the first chunk does not announce a snapshot.
            DamagedCode: the archive is not the one that was announced.
            AgentError: the disk has no room, or the sender fell silent.
        """
        began = time.monotonic()
        first = await _next(chunks)
        if first is None or not DIGEST.fullmatch(first.digest):
            raise ConfigError("a snapshot is announced by its digest, 64 hexadecimal digits, in the first chunk")
        if not 0 < first.bytes <= MOST_BYTES:
            raise ConfigError(f"an archive of {first.bytes} bytes is none of code: one has at most {MOST_BYTES}")
        digest = first.digest
        with self.kept(digest):
            if await self.has([digest]):
                return pb.PutCodeReply(reused=True)
            coming = self.folder / f"{COMING}{self._token}-{uuid.uuid4().hex}"
            over = False
            try:
                small = await self._received(first, chunks, coming)
                async with self._turns.setdefault(digest, asyncio.Lock()):
                    unpacked = await self.reads.do(partial(self._take, small, coming, digest))
                    over = True
                    if unpacked is None:
                        return pb.PutCodeReply(reused=True)  # somebody else brought it meanwhile
            except OSError as error:
                raise AgentError(
                    f"{self.machine} cannot keep the code: {error.strerror or error} ({self.folder})"
                ) from error
            finally:
                if not over:
                    await self.reads.do(partial(shutil.rmtree, coming, ignore_errors=True))
        seconds = time.monotonic() - began
        logger.info("code came", digest=digest, bytes=unpacked, seconds=round(seconds, 3))
        return pb.PutCodeReply(bytes=unpacked, seconds=seconds)

    async def script(self, digest: str, script: str, *, verified: bool = False) -> Path:
        """The path of a script in a snapshot; ``verified``: all files are read, and a damaged snapshot is removed.

        Raises:
            CodeMissing: the snapshot is not here, or is damaged: it has to be brought.
            ConfigError: it has no such script.
        """
        if not DIGEST.fullmatch(digest):
            raise ConfigError(f"{digest!r} is no digest of code")
        if Path(script).is_absolute() or ".." in Path(script).parts:
            raise ConfigError(f"script {script} is no path within a snapshot of code")
        path = self.folder / digest / script
        try:
            look, patience_s = (self._is_sound, None) if verified else (self._is_whole, LOOK_PATIENCE_S)
            whole, there = await self.reads.do(lambda: (look(digest), path.is_file()), patience_s)
        except TimeoutError:
            logger.error("the disk does not say whether code is whole", digest=digest)
            return path
        if not whole:
            raise CodeMissing(f"{self.machine} does not have the code {digest[:12]}, or had it damaged")
        if not there:
            raise ConfigError(f"script {script} is not in the code {digest[:12]}")
        return path

    @contextlib.contextmanager
    def kept(self, digest: str) -> Iterator[None]:
        """Keep a snapshot from being removed meanwhile."""
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
        """Receive an archive: a small one is returned, a larger one is written to a file."""
        if first.bytes <= IN_MEMORY:
            archive = bytearray(first.data)
            while len(archive) <= first.bytes and (chunk := await _next(chunks)) is not None:
                archive += chunk.data
            self._check_size(len(archive), first.bytes)
            return archive
        await self._written(first, chunks, coming)
        return None

    async def _written(self, first: pb.CodeChunk, chunks: AsyncIterator[pb.CodeChunk], coming: Path) -> None:
        await self.reads.do(lambda: private.make_folder(private.make_folder(self.folder) / coming.name))
        came = 0
        chunk: pb.CodeChunk | None = first
        archive = await self.reads.do(lambda: open(coming / "archive", "xb", opener=private.open_file))  # noqa: SIM115
        try:
            while chunk is not None:
                came += len(chunk.data)
                if came > first.bytes:
                    break
                await self.reads.do(partial(archive.write, chunk.data))
                chunk = await _next(chunks)
        finally:
            await self.reads.do(archive.close)
        self._check_size(came, first.bytes)

    def _check_size(self, came: int, announced: int) -> None:
        if came != announced:
            raise DamagedCode(f"{came} bytes of the archive came to {self.machine}, and {announced} were announced")

    # In threads.

    def _take(self, small: bytearray | None, coming: Path, digest: str) -> int | None:
        """Unpack an archive beside, and give it its name; returns its bytes, None: it was here already.

        Args:
            small: The archive; None: it is a file in the folder.
            coming: The folder; is made where it is not there, and removed.
            digest: What it holds.
        """
        try:
            return None if self._is_whole(digest) else self._unpacked(small, coming, digest)
        finally:
            shutil.rmtree(coming, ignore_errors=True)

    def _unpacked(self, small: bytearray | None, coming: Path, digest: str) -> int:
        private.make_folder(private.make_folder(self.folder) / coming.name)
        with io.BytesIO(small) if small is not None else (coming / "archive").open("rb") as archive:
            files = unpack(archive, coming / "tree", digest)
        rows = [FileSeen.of(coming / "tree", file.path, file.kind) for file in files]
        index = [[row.path, row.kind, row.size, row.mtime_ns, row.ctime_ns] for row in rows]
        with self._lock:
            self._remove(digest)  # what is left of an earlier one
            (coming / "tree").rename(self.folder / digest)
            private.replace(self._index(digest), json.dumps({"digest": digest, "files": index}))
            self._prune()
        return sum(file.bytes for file in files)

    def _is_whole(self, digest: str) -> bool:
        """Whether no file of a snapshot was changed or removed since it was unpacked; it counts as used."""
        rows = self._rows(digest)
        if rows is None:
            return False
        folder = self.folder / digest
        try:
            for row in rows:
                if FileSeen.of(folder, row.path, row.kind) != row:
                    raise FileNotFoundError(errno.ENOENT, "it was changed", row.path)
        except OSError as error:
            logger.warning("code is damaged, and counts as missing", digest=digest, reason=str(error))
            return False
        with contextlib.suppress(OSError):
            os.utime(self._index(digest))
        return True

    def _is_sound(self, digest: str) -> bool:
        """Whether the contents of a snapshot match its digest."""
        rows, folder = self._rows(digest), self.folder / digest
        if rows is None or not self._is_whole(digest):
            return False
        files = []
        with contextlib.suppress(OSError):
            for row in rows:
                path = folder / row.path
                contents = str(path.readlink()).encode() if row.kind == "l" else path.read_bytes()
                files.append(CodeFile(row.path, row.kind, hashlib.sha256(contents).hexdigest()))
        if digest_of(files) == digest:
            return True
        logger.warning("code is damaged, and is removed", digest=digest)
        with self._lock:
            self._remove(digest)
        return False

    def _rows(self, digest: str) -> list[FileSeen] | None:
        """The index of a snapshot; None: there is none."""
        try:
            index = json.loads(self._index(digest).read_bytes())
            return [FileSeen(*row) for row in index["files"]] if index["digest"] == digest else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _prune(self) -> None:
        """Remove the least recently used snapshots beyond those that are kept."""
        found = []
        for index in self.folder.glob("*.json"):
            with contextlib.suppress(OSError):
                digest = index.stem
                size = sum(row.size for row in self._rows(digest) or [])
                found.append((index.stat().st_mtime_ns, digest, size))
        spared = self.in_use()
        self.snapshots, self.bytes = len(found), sum(size for *_, size in found)
        for _, digest, size in sorted(found):
            if self.snapshots <= KEPT and self.bytes <= KEPT_BYTES:
                break
            if digest not in spared and digest not in self._pinned:
                logger.info("removing code that was not used for long", digest=digest, bytes=size)
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
        """Remove a snapshot, first its index: from then on it is not here."""
        self._index(digest).unlink(missing_ok=True)
        going = self.folder / f"{GOING}{uuid.uuid4().hex}"
        with contextlib.suppress(FileNotFoundError):
            (self.folder / digest).rename(going)
            shutil.rmtree(going, ignore_errors=True)

    def _index(self, digest: str) -> Path:
        return self.folder / f"{digest}.json"


async def _next(chunks: AsyncIterator[pb.CodeChunk]) -> pb.CodeChunk | None:
    """The next chunk; None: there are no more.

    Raises:
        AgentError: none comes for long.
    """
    try:
        async with asyncio.timeout(CHUNK_PATIENCE_S):
            return await anext(chunks, None)
    except TimeoutError:
        raise AgentError(f"no more of the archive came for {CHUNK_PATIENCE_S:g} s") from None
