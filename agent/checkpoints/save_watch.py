"""Notices each save of each rank on this machine as it is committed.

A rank that committed a slot writes a byte into a FIFO, the *bell*, without
waiting. The bell's thread then reads the headers of the job's checkpoint files
and tells of each slot that was not there before. A slow poll stands behind it,
for ranks that cannot ring and rings that are lost.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

import structlog

from everstep.errors import CorruptCheckpoint
from everstep.slots.format import SlotHeader
from everstep.slots.names import BACKUP, OWN
from everstep.slots.reader import SlotReader
from everstep.system import private_files as private
from everstep.system.wake_up import WakeUp

POLL_S = 0.25
"""Headers are read this often even when nobody rings."""
NAME = "bell"

Saved = Callable[[int, SlotHeader], None]

logger = structlog.get_logger()


class SaveWatch:
    """Tells of every committed slot of a job's own checkpoint files, in one thread.

    What is held when it starts is told too, oldest first: so whoever subscribes
    after a restart of the agent knows the latest state. A subscriber must
    return at once; one that raises is logged and not told again of that slot.

    Args:
        shm: The job's folder in shared memory.
        subscribers: Called as ``on_saved(rank, header)``.
        on_held: Told of all steps that a rank's slots hold, before of a new one among them.
    """

    def __init__(
        self, shm: Path, subscribers: Iterable[Saved], *, on_held: Callable[[int, list[int]], None] | None = None
    ) -> None:
        self.shm = shm
        self._subscribers = list(subscribers)
        self._on_held = on_held
        self._readers: dict[int, SlotReader] = {}
        self._seen: dict[int, set[SlotHeader]] = {}
        self._fifo = _open_fifo(shm / NAME)
        self._wake_up = WakeUp()
        self._ended = False
        self._thread = threading.Thread(target=self._run, name=f"bell {shm.name}", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self) -> None:
        """End the thread; nobody is told anything after that. The FIFO stays: ranks may ring it."""
        self._ended = True
        self._wake_up.ring()
        if self._thread.is_alive():
            self._thread.join()
        self._wake_up.close()
        os.close(self._fifo)
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()

    def _run(self) -> None:
        while not self._ended:
            self._look()
            if self._wake_up.wait(self._fifo, POLL_S):
                with contextlib.suppress(BlockingIOError):
                    os.read(self._fifo, 4096)

    def _look(self) -> None:
        for rank, path in own_files(self.shm).items():
            try:
                reader = self._readers.get(rank)
                if reader is None:
                    reader = self._readers[rank] = SlotReader(path)
                headers = reader.headers()
            except (OSError, CorruptCheckpoint):  # it is being made, or replaced; Stop names what is damaged
                continue
            known = self._seen.get(rank, set())
            self._seen[rank] = set(headers)
            if self._on_held and not known.issuperset(headers):
                self._on_held(rank, [header.completed_steps for header in headers])
            for header in headers:
                if header not in known:
                    self._tell(rank, header)

    def _tell(self, rank: int, header: SlotHeader) -> None:
        for subscriber in self._subscribers:
            try:
                subscriber(rank, header)
            except Exception as error:
                logger.error("a save was not taken notice of", rank=rank, step=header.completed_steps, exc_info=error)


def make_fifo(shm: Path) -> Path:
    """The FIFO that ranks ring, made when it is not there; returns its path."""
    path = shm / NAME
    private.make_folder(shm)
    if not path.is_fifo():
        path.unlink(missing_ok=True)
        os.mkfifo(path, 0o600)
    return path


def own_files(shm: Path) -> dict[int, Path]:
    """The checkpoint files of this machine's own ranks, by rank."""
    return _numbered(shm, OWN)


def backup_files(shm: Path) -> dict[int, Path]:
    """The backups that this machine holds for others, by rank."""
    return _numbered(shm, BACKUP)


def _numbered(shm: Path, prefix: str) -> dict[int, Path]:
    found = {}
    for path in shm.glob(f"{prefix}*"):
        rank = path.name.removeprefix(prefix)
        if rank.isdecimal():
            found[int(rank)] = path
    return dict(sorted(found.items()))


def _open_fifo(path: Path) -> int:
    """Open for reading; for writing too, so that it does not end when the last rank closes it."""
    make_fifo(path.parent)
    descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    assert stat.S_ISFIFO(os.fstat(descriptor).st_mode)
    return descriptor
