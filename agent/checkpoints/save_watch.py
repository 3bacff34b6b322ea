"""This module detects each save of each rank on this machine when the slot is committed.

A rank that committed a slot writes a byte into a FIFO, the *save signal*, without
waiting. A thread then reads the headers of the job's checkpoint files and reports
each new slot. The thread also polls the headers slowly, because a signal can be lost.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

import structlog

from agent.checkpoints.options import Place
from everstep.errors import CorruptCheckpoint
from everstep.slots.format import BACKUP, OWN, SlotHeader
from everstep.slots.reader import SlotReader
from everstep.system import private_files as private
from everstep.system.wake_up import WakeUp

POLL_S = 0.25
"""Headers are read at this interval even if no signal arrives, seconds."""
NAME = "save-signal"

Saved = Callable[[int, SlotHeader], None]

logger = structlog.get_logger()


class SaveWatch:
    """Reports every committed slot of a job's own checkpoint files to its subscribers, in one thread.

    Slots that exist at the start are reported too, oldest first, so that a subscriber knows the latest state after a
    restart of the agent. A subscriber must return at once; its errors are logged, and the slot is not reported to it
    again.

    Args:
        place: Locations of the job's copies.
        subscribers: Called as ``on_saved(rank, header)``.
        on_held: Called with all steps in a rank's slots, and the number of slots for its newest steps, before a new
            slot of the rank is reported.
    """

    def __init__(
        self,
        place: Place,
        subscribers: Iterable[Saved],
        *,
        on_held: Callable[[int, list[int], int], None] | None = None,
    ) -> None:
        self.shm = place.shm
        self._place = place
        self._subscribers = list(subscribers)
        self._on_held = on_held
        self._readers: dict[int, SlotReader] = {}
        self._seen: dict[int, set[SlotHeader]] = {}
        self._fifo = _open_fifo(place.shm / NAME)
        self._wake_up = WakeUp()
        self._ended = False
        self._thread = threading.Thread(target=self._run, name=f"save watch {place.job}", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """End the thread; no subscriber is called after that. The FIFO stays, because ranks may write to it."""
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
            self._read_headers()
            if self._wake_up.wait(self._fifo, POLL_S):
                with contextlib.suppress(BlockingIOError):
                    os.read(self._fifo, 4096)

    def _read_headers(self) -> None:
        for rank, path in own_files(self.shm).items():
            try:
                reader = self._readers.get(rank)
                if reader is None:
                    reader = self._readers[rank] = SlotReader(path, self._place.owner(rank))
                headers, newest_slots = reader.headers(), reader.newest_slots()
            except (OSError, CorruptCheckpoint):  # the file is being made or replaced; Stop reports damaged files
                continue
            before = self._seen.get(rank, set())
            self._seen[rank] = set(headers)
            if self._on_held and not before.issuperset(headers):
                self._on_held(rank, [header.completed_steps for header in headers], newest_slots)
            for header in headers:
                if header not in before:
                    self._notify(rank, header)

    def _notify(self, rank: int, header: SlotHeader) -> None:
        for subscriber in self._subscribers:
            try:
                subscriber(rank, header)
            except Exception as error:
                logger.error("a subscriber to saves failed", rank=rank, step=header.completed_steps, exc_info=error)


def make_fifo(shm: Path) -> Path:
    """Return the path of the FIFO for save signals; the FIFO is made if it does not exist."""
    path = shm / NAME
    private.make_folder(shm)
    if not path.is_fifo():
        path.unlink(missing_ok=True)
        os.mkfifo(path, 0o600)
    return path


def own_files(shm: Path) -> dict[int, Path]:
    """Return the checkpoint files of this machine's own ranks, by rank."""
    return _numbered(shm, OWN)


def backup_files(shm: Path) -> dict[int, Path]:
    """Return the backups that this machine holds for other machines, by rank."""
    return _numbered(shm, BACKUP)


def _numbered(shm: Path, prefix: str) -> dict[int, Path]:
    found = {}
    for path in shm.glob(f"{prefix}*"):
        rank = path.name.removeprefix(prefix)
        if rank.isdecimal():
            found[int(rank)] = path
    return dict(sorted(found.items()))


def _open_fifo(path: Path) -> int:
    """Open the FIFO for reading and writing, so that it does not end when the last rank closes it."""
    make_fifo(path.parent)
    descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    assert stat.S_ISFIFO(os.fstat(descriptor).st_mode)
    return descriptor
