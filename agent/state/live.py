"""This module keeps the agent's records in shared memory, and a copy of them in the state folder.

A record is written to shared memory at once; its copy is on the disk as soon as the disk accepts it. The folder in
shared memory, ``<shm-dir>/_agent``, outlives the agent as the ranks do, and no write to it waits for a disk. The copies
in the state folder are used only if the folder in shared memory is gone: after a reboot, or because shared memory was
full. The newest lines may be missing in the copies. After a reboot, all processes of the jobs are gone too.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator
from io import FileIO
from pathlib import Path

import structlog

from agent.state.disk import StateDisk
from agent.state.job_record import FILE, JobRecord
from everstep.errors import ConfigError
from everstep.system import private_files as private

FOLDER = "_agent"
"""Name of the folder in the agent's folder in shared memory; no job can have this name."""
WAITING_BYTES = 4 << 20
"""If more bytes of lines wait for the disk, the complete file is written again."""
FENCE_BYTES = 4096
"""The room that is reserved for a fence: one page."""

logger = structlog.get_logger()


class LiveLines:
    """A file of lines in shared memory, with a copy on disk that is written later.

    Args:
        path: Path in shared memory.
        copy: Path on disk; None: there is no copy.
        disk: Writes the copy.
    """

    def __init__(self, path: Path, copy: Path | None = None, disk: StateDisk | None = None) -> None:
        self.path = path
        self._copy = copy
        self._disk = disk
        self._file: FileIO | None = None
        self.complete = path.exists() or copy is None
        """Whether ``read`` certainly returns all lines."""

    def read(self) -> list[bytes]:
        """Return the lines that an earlier agent wrote; a last line without a line feed is incomplete, and dropped."""
        for path in (self.path, self._copy):
            if path is not None and path.exists():
                *lines, torn = path.read_bytes().split(b"\n")
                if torn:
                    logger.warning("dropped an incomplete last line", path=str(path), bytes=len(torn))
                return lines
        return []

    def append(self, line: bytes) -> bool:
        """Append a line; if it returns False, ``rewrite`` must be called with all lines, the new line included."""
        waiting = self._disk.append(self._copy, line) if self._disk and self._copy else 0
        if self._file is None:
            return False
        try:
            if self._file.write(line) == len(line):
                return waiting <= WAITING_BYTES
            reason = "there is no room for all of it"
        except OSError as error:
            reason = str(error)
        self._lose(reason)
        return True

    def rewrite(self, lines: Iterable[bytes]) -> None:
        """Replace all lines."""
        contents = b"".join(lines)
        if self._disk and self._copy:
            self._disk.put(self._copy, contents, lasting=True)
        try:
            private.make_folder(self.path.parent)
            private.replace(self.path, contents)
            self.close()
            self._file = FileIO(os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC), "ab")
        except (OSError, ConfigError) as error:
            self._lose(str(error))

    def close(self) -> None:
        """Close the file."""
        if self._file:
            self._file.close()
        self._file = None

    def _lose(self, reason: str) -> None:
        """Remove the file because not all of its lines have room; from then on the copy on disk is used."""
        logger.error("a file cannot be kept in shared memory", path=str(self.path), reason=reason)
        self.close()
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)


class LiveRecords:
    """The records of all jobs in shared memory, with copies on disk that are written later.

    Args:
        folder: Folder in shared memory.
        jobs: Folder on disk with one folder for each job.
        disk: Writes the copies.
    """

    def __init__(self, folder: Path, jobs: Path, disk: StateDisk) -> None:
        self._folder = folder
        self._jobs = jobs
        self._disk = disk

    def load(self) -> Iterator[JobRecord]:
        """Return the newest record of each job that earlier agents wrote, with its fence."""
        latest: dict[str, JobRecord] = {}
        paths = [*self._folder.glob("*.json"), *self._jobs.glob(f"*/{FILE}")]
        for path in sorted(paths):
            if "." in path.parent.name:
                continue  # from an earlier run
            try:
                record = JobRecord.model_validate_json(path.read_bytes())
            except (ValueError, OSError) as error:
                logger.error("a job's record is damaged and ignored", path=str(path), reason=str(error))
                continue
            if record.job not in latest or record.revision > latest[record.job].revision:
                latest[record.job] = record
        for record in latest.values():
            record.fenced = max(record.fenced, self._fence_of(record))
            yield record

    def begin(self, record: JobRecord) -> None:
        """Create the file with the fence of a job's run.

        The room for the fence is reserved now, so that a later write cannot fail.
        """
        try:
            private.make_folder(self._folder)
            private.replace(self._fence(record.job), _fence_page(record))
        except (OSError, ConfigError) as error:
            logger.error("a fence has no room in shared memory", job=record.job, reason=str(error))

    def fence(self, record: JobRecord) -> None:
        """Write the fence into its reserved room; this cannot fail or wait."""
        with contextlib.suppress(OSError), open(self._fence(record.job), "r+b", 0, opener=private.open_file) as file:
            file.write(_fence_page(record))

    def keep(self, record: JobRecord) -> None:
        """Write the current state of a record."""
        record.revision += 1
        text = record.model_dump_json().encode()
        path = self._folder / f"{record.job}.json"
        try:
            private.make_folder(self._folder)
            private.replace(path, text)
        except (OSError, ConfigError) as error:
            logger.error("a job's record has no room in shared memory", path=str(path), reason=str(error))
        self._disk.put(self._jobs / record.job / FILE, text)

    def _fence(self, job: str) -> Path:
        return self._folder / f"{job}.fence"

    def _fence_of(self, record: JobRecord) -> int:
        try:
            fields = json.loads(self._fence(record.job).read_bytes())
            return int(fields["fenced"]) if fields["run"] == record.run else 0
        except (OSError, ValueError, KeyError, TypeError):
            return 0


def _fence_page(record: JobRecord) -> bytes:
    return json.dumps({"run": record.run, "fenced": record.fenced}).encode().ljust(FENCE_BYTES)
