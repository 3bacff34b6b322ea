"""This module has a backup that this machine holds for another machine's rank, and the transfer that fills it."""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import structlog

from agent.checkpoints.options import abandoned
from agent.checkpoints.peers.copy_requests import Offer
from agent.checkpoints.peers.parts import Incoming, Range
from agent.checkpoints.peers.wire import Wire
from everstep.errors import BackupRefused, CheckpointError
from everstep.slots.file import SlotFile
from everstep.slots.format import SlotHeader
from everstep.slots.owner import SlotOwner
from everstep.slots.reader import SlotReader

logger = structlog.get_logger()


class Backup:
    """A backup file and the transfer that fills it."""

    def __init__(self, path: Path, owner: SlotOwner) -> None:
        self.path = path
        self.owner = owner
        self.turn = threading.Lock()
        """Locked by the connection that fills the file, and while the file is cleared."""
        self.generation = max((header.generation for header in self.headers()), default=0)
        """The newest generation that offered a slot; after a restart of the agent, the newest one in the file."""
        self.file: SlotFile | None = None
        self.user: Wire | None = None
        self.incoming: Incoming | None = None
        """The slot that has arrived in part; None: there is no such slot."""
        self.transfer: Transfer | None = None
        """The transfer that fills the file now."""
        self._mapped = (0, 0)

    def opened(self, slots: int) -> SlotFile:
        """Return the file; a new file is made with ``slots`` slots.

        A file that another program truncated or removed is opened again, because a write beyond its end would kill the
        agent.
        """
        if self.file and self.file.is_mapped and self._identity() != self._mapped:
            logger.warning("a backup was changed from outside", path=str(self.path))
            self.close()
        if self.file is None:
            self.file = SlotFile(self.path, slots=slots, owner=self.owner)
            self._mapped = self._identity()
        return self.file

    def receive(self, header: SlotHeader, slots: int) -> None:
        """Begin to receive a slot."""
        self.incoming = Incoming(header, self.opened(slots).receive(header))
        self._mapped = self._identity()  # the file may have grown

    def _identity(self) -> tuple[int, int]:
        """Return inode number and size of the file; 0, 0: there is none."""
        try:
            status = self.path.stat()
        except OSError:
            return 0, 0
        return status.st_ino, status.st_size

    def headers(self) -> list[SlotHeader]:
        """Return the headers of the held slots, oldest first."""
        try:
            reader = SlotReader(self.path, self.owner)
        except (OSError, CheckpointError):
            return []
        with contextlib.closing(reader):
            return reader.headers()

    def give_up(self) -> None:
        """Discard a slot that was received in part."""
        incoming, self.incoming = self.incoming, None
        if incoming:
            incoming.view.release()
        if self.file:
            self.file.abort()

    def keep(self, step: int) -> None:
        """Keep this step if it is held: drop all later steps, so that the next slot replaces one of the later steps."""
        held = [header.completed_steps for header in self.headers()]
        for later in held:
            if 0 < step < later and step in held:
                self.opened(2).forget(later)

    def drop_abandoned(self, generation: int, resume_step: int) -> None:
        """Drop the slots that a generation, which began at ``resume_step``, abandons."""
        for header in self.headers():
            if abandoned(header, generation, resume_step):
                self.opened(2).forget(header.completed_steps)

    def close(self) -> None:
        """Unmap the file."""
        self.give_up()
        if self.file:
            self.file.close()
        self.file = None


class BackupFence(Protocol):
    """Decides whether a backup may be written; ``PeerBackups`` implements it."""

    def unfenced(self, generation: int) -> contextlib.AbstractContextManager[None]:
        """Return a context in which a commit is safe from a concurrent Stop."""

    def require(self, size: int, rank: int) -> None:
        """Make sure that there is room for a file."""


class Transfer:
    """The transfer of one slot into a backup. The connection that offered it leads; others may carry parts too."""

    def __init__(self, fence: BackupFence, backup: Backup, offer: Offer, header: SlotHeader) -> None:
        self.number = secrets.randbits(64)
        """With this number, further connections join the transfer."""
        self._joined: set[Wire] = set()
        self._left = threading.Condition()
        self._over = False
        self._fence = fence
        self._backup = backup
        self._offer = offer
        self.header = header
        self.held = False
        """Whether the complete slot is here already."""

    def missing(self) -> list[Range]:
        """Return the ranges of the payload that have not been received."""
        return self._backup.incoming.missing() if self._backup.incoming and not self.held else []

    def grows(self) -> bool:
        """Return whether memory must be allocated first, which needs seconds for each 10 GB."""
        return not self.held and self._lacks() > 0

    def _lacks(self) -> int:
        """Return the number of bytes that must still be allocated for the file."""
        return self._backup.opened(self._offer.slots).missing(self.header.payload_bytes)

    def begin(self) -> None:
        """Make room, unless a part of the slot was received already.

        Raises:
            BackupRefused: there is no room.
        """
        backup = self._backup
        if self.held:
            return
        lacks = self._lacks()
        if backup.incoming and backup.incoming.header == self.header:
            return
        backup.give_up()
        if lacks:
            self._fence.require(lacks, self._offer.rank)
        backup.keep(self._offer.keep)
        try:
            backup.receive(self.header, self._offer.slots)
        except CheckpointError as error:
            raise BackupRefused(str(error)) from error

    @property
    def incoming(self) -> Incoming:
        """The payload, after ``begin``."""
        assert self._backup.incoming
        return self._backup.incoming

    @contextlib.contextmanager
    def joined(self, wire: Wire) -> Iterator[None]:
        """While the block runs, a further connection may carry parts.

        Raises:
            BackupRefused: the transfer is over.
        """
        with self._left:
            if self._over or self._backup.incoming is None:
                raise BackupRefused("the transfer is over")
            self._joined.add(wire)
        try:
            yield
        finally:
            with self._left:
                self._joined.discard(wire)
                self._left.notify_all()

    def close(self) -> None:
        """End the transfer. Further connections are broken, and none of them writes any more when this returns."""
        with self._left:
            self._over = True
            for wire in self._joined:
                wire.cut()
            self._left.wait_for(lambda: not self._joined)

    def give_up(self) -> None:
        """Discard the transfer, because the sender has lost the slot."""
        self.close()
        self._backup.give_up()

    def commit(self) -> None:
        """Verify the complete slot and commit it.

        Raises:
            Fenced: its generation was stopped during the transfer.
            CorruptCheckpoint: the bytes differ from the bytes that the rank saved.
            WireError: bytes are missing.
        """
        self.close()  # no connection may write into a slot that is verified
        backup, checksum = self._backup, self.incoming.checksum()
        try:
            with self._fence.unfenced(self._offer.generation):
                assert backup.file
                backup.file.commit_received(self.header, checksum)
        finally:
            backup.give_up()
