"""This module makes the agent's writes to its state folder in one thread, so that no command waits for a disk.

The disk may be full, or may hang. State that must survive the agent is in shared memory (``live.py``); the disk gets a
copy a moment later, which is used after a reboot. A write that failed is logged, and repeated every second. The amount
of waiting data is limited, because a file that grows by lines is rewritten when too many lines wait.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from everstep.errors import EverstepError
from everstep.system import private_files as private

RETRY_S = 1.0
"""Time between two attempts of a write that failed, seconds."""
SILENT_S = 2.0
"""If one write takes longer than this, the disk is reported to hang, seconds."""
LOOK_S = 0.005

logger = structlog.get_logger()


@dataclass(slots=True)
class _Contents:
    """The bytes that wait to be written to one file."""

    whole: bytes | None = None
    """New contents of the file; None: only lines are appended."""
    lasting: bool = False
    lines: list[bytes] = field(default_factory=list)


class StateDisk:
    """The writes of an agent. All methods except ``flush`` and ``close`` return at once."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._fresh: OrderedDict[Hashable, Callable[[], object]] = OrderedDict()
        """Work that was not tried yet, by key, in order."""
        self._failed: OrderedDict[Hashable, Callable[[], object]] = OrderedDict()
        self._files: dict[Path, _Contents] = {}
        self._again_at = 0.0
        self._busy_since = 0.0
        self._problem = ""
        self._closing = False
        self._thread: threading.Thread | None = None

    def put(self, path: Path, contents: bytes, *, lasting: bool = False) -> None:
        """Replace a file's contents, and all data that waits to be written to it."""
        with self._changed:
            self._files[path] = _Contents(contents, lasting)
            self._queue(path, lambda: self._write(path))

    def append(self, path: Path, line: bytes) -> int:
        """Add a line to a file; returns how many bytes wait to be written to the file.

        If too many bytes wait, the caller should call ``put`` with the complete contents.
        """
        with self._changed:
            waiting = self._files.setdefault(path, _Contents())
            waiting.lines.append(line)
            self._queue(path, lambda: self._write(path))
            return sum(map(len, waiting.lines))

    def forget(self, path: Path) -> None:
        """Drop the data that waits to be written to a file."""
        with self._changed:
            self._files.pop(path, None)
            self._fresh.pop(path, None)
            self._failed.pop(path, None)

    def run(self, key: Hashable, work: Callable[[], object]) -> None:
        """Run other work in the thread once. If earlier work with the same key still waits, it is replaced."""
        with self._changed:
            self._queue(key, work)

    @property
    def problem(self) -> str:
        """Explain why nothing is written now; empty: writing works."""
        since = self._busy_since
        if since and (silent_s := time.monotonic() - since) > SILENT_S:
            return f"it does not answer for {silent_s:.0f} s"
        return self._problem

    async def flush(self, timeout_s: float) -> bool:
        """Wait until the thread has tried to write all waiting data; returns False if the time runs out first."""
        deadline = time.monotonic() + timeout_s
        while self._fresh or self._busy_since:
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(LOOK_S)
        return True

    def close(self, timeout_s: float) -> None:
        """Try to write all waiting data once more, and end the thread; waits for this at most ``timeout_s``."""
        with self._changed:
            self._closing = True
            self._fresh = OrderedDict([*self._failed.items(), *self._fresh.items()])
            self._failed.clear()
            self._changed.notify_all()
        if self._thread:
            self._thread.join(timeout_s)

    def _queue(self, key: Hashable, work: Callable[[], object]) -> None:
        self._failed.pop(key, None)
        self._fresh[key] = work
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="state disk", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _serve(self) -> None:
        while next_work := self._next():
            key, work = next_work
            problem = ""
            try:
                work()
            except (OSError, EverstepError) as error:
                problem = str(error)
            except Exception as error:
                logger.error("work on the state folder failed", exc_info=error)
            self._ended(key, work, problem)

    def _next(self) -> tuple[Hashable, Callable[[], object]] | None:
        with self._changed:
            while True:
                left = self._again_at - time.monotonic()
                if self._failed and left <= 0:
                    self._fresh = OrderedDict([*self._failed.items(), *self._fresh.items()])
                    self._failed.clear()
                if self._fresh:
                    break
                if self._closing:
                    return None
                self._changed.wait(left if self._failed else None)
            self._busy_since = time.monotonic()
            return self._fresh.popitem(last=False)

    def _ended(self, key: Hashable, work: Callable[[], object], problem: str) -> None:
        with self._changed:
            self._busy_since = 0.0
            if problem and key not in self._fresh and not self._closing:
                self._again_at = self._again_at if self._failed else time.monotonic() + RETRY_S
                self._failed[key] = work
            if problem or not self._failed:
                changed, self._problem = problem != self._problem, problem
            else:
                changed = False
        if changed and problem:
            logger.error("the state folder cannot be written; nothing waits for it", reason=problem)
        elif changed:
            logger.info("the state folder is written again")

    def _write(self, path: Path) -> None:
        with self._changed:
            wanted = self._files.pop(path, None)
        if wanted is None:
            return
        try:
            if wanted.whole is not None:
                private.replace(path, b"".join([wanted.whole, *wanted.lines]), lasting=wanted.lasting)
            else:
                append(path, b"".join(wanted.lines))
        except OSError:
            with self._changed:
                later = self._files.get(path, _Contents())
                if later.whole is None:
                    self._files[path] = _Contents(wanted.whole, wanted.lasting, [*wanted.lines, *later.lines])
            raise


def append(path: Path, data: bytes) -> None:
    """Append all of the data to a file; if this fails, append none of it and raise OSError."""
    with open(path, "ab", buffering=0, opener=private.open_file) as file:
        before = os.fstat(file.fileno()).st_size
        try:
            if (done := file.write(data)) < len(data):  # the next write raises the disk's error
                file.write(data[done:])
                raise OSError(f"only {done} of {len(data)} bytes were written to {path}")
        except OSError:
            os.truncate(path, before)
            raise
