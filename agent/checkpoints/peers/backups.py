"""This module holds the backups for other machines' ranks, and decides which connections may write them.

Each backup is a checkpoint file of a few slots, ``backup-<rank>``, which one connection at a time fills. If a transfer
breaks, the next offer of the same slot resumes it where it ended.

Two rules keep old data out. First, a stopped generation can neither begin nor commit a transfer. Second, each offer,
and this machine's own Launch, contains the step at which its generation begins. When the first of these messages
arrives, the copies that earlier generations saved after that step are dropped.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import structlog

from agent.checkpoints.peers.backup import Backup, Transfer
from agent.checkpoints.peers.copy_requests import Offer, as_header
from agent.checkpoints.peers.wire import Wire
from agent.checkpoints.save_watch import backup_files
from everstep.base.text import size_text
from everstep.errors import BackupRefused, ConfigError, Fenced
from everstep.slots.format import SlotHeader, backup_slots
from everstep.slots.owner import SlotOwner
from everstep.system import private_files as private
from everstep.system.memory import free, memory_available

TAKE_OVER_S = 5.0
"""A connection that was closed releases its backup file within this time, seconds."""

logger = structlog.get_logger()


class PeerBackups:
    """All backups that a machine holds for one job; thread-safe.

    Args:
        shm: The job's folder in shared memory.
        owner: Returns the owner that the slots of a rank must have.
        fenced: The newest generation that was stopped.
    """

    def __init__(self, shm: Path, owner: Callable[[int], SlotOwner], fenced: int = 0) -> None:
        self.shm = shm
        self.owner = owner
        self._lock = threading.Lock()
        self._fenced = fenced
        self._launched = 0
        self._closed = False
        self._backups: dict[int, Backup] = {}

    @contextlib.contextmanager
    def transfer(self, offer: Offer, wire: Wire) -> Iterator[Transfer]:
        """Accept an offer; an earlier connection that filled the same backup is closed.

        Raises:
            Fenced: the offer's generation was stopped.
            BackupRefused: this machine holds a newer state.
        """
        header = as_header(offer.header.model_dump())
        backup = self._backup(offer.rank)
        with self.unfenced(offer.generation):
            if offer.generation < backup.generation:
                raise Fenced(
                    f"rank {offer.rank} has already sent generation {backup.generation}, which is newer than "
                    f"{offer.generation}"
                )
            if backup.user:
                backup.user.cut()
        if not backup.turn.acquire(timeout=TAKE_OVER_S):
            raise BackupRefused(f"another transfer of rank {offer.rank} does not end")
        try:
            with self.unfenced(offer.generation):
                backup.user = wire
            transfer = self._accept(backup, offer, header)
            with self._lock:
                backup.transfer = transfer
            try:
                yield transfer
            finally:
                transfer.close()
        finally:
            with self._lock:
                backup.transfer = None
                if backup.user is wire:
                    backup.user = None
            backup.turn.release()

    @contextlib.contextmanager
    def joined(self, rank: int, number: int, wire: Wire) -> Iterator[Transfer]:
        """Let a further connection carry parts of a transfer.

        Raises:
            BackupRefused: there is no such transfer, or it is over.
        """
        with self._lock:
            backup = self._backups.get(rank)
            transfer = backup.transfer if backup else None
        if transfer is None or transfer.number != number:
            raise BackupRefused(f"there is no transfer {number} of rank {rank}")
        with transfer.joined(wire):
            yield transfer

    def _accept(self, backup: Backup, offer: Offer, header: SlotHeader) -> Transfer:
        if offer.generation > backup.generation:
            backup.drop_abandoned(offer.generation, offer.resume_step)
            backup.generation = offer.generation
        transfer = Transfer(self, backup, offer, header)
        held = backup.headers()
        transfer.held = header in held
        newest = max((copy.completed_steps for copy in held), default=-1)
        if newest > header.completed_steps and not transfer.held:
            raise BackupRefused(f"step {newest} of rank {offer.rank} is held already", newest)
        return transfer

    @contextlib.contextmanager
    def unfenced(self, generation: int) -> Iterator[None]:
        """Return a context in which a commit is safe from a concurrent Stop.

        Raises:
            Fenced: the generation was stopped, or the job is over.
        """
        with self._lock:
            if self._closed:
                raise Fenced("the job is over here")
            if generation <= self._fenced:
                raise Fenced(f"generation {generation} was stopped: everything up to {self._fenced} is fenced")
            yield

    def launch(self, generation: int, resume_step: int) -> None:
        """Drop the slots that a new generation abandons."""
        self._launched = generation
        for rank in backup_files(self.shm):
            backup = self._backup(rank)
            # If a backup has accepted an offer of the new generation, it has dropped these slots already.
            if backup.generation < generation and backup.turn.acquire(timeout=TAKE_OVER_S):
                if backup.generation < generation:
                    backup.drop_abandoned(generation, resume_step)
                backup.turn.release()

    def stop(self, generation: int) -> None:
        """Fence a generation and older ones, and discard slots that were received in part."""
        with self._lock:
            self._fenced = max(self._fenced, generation)
            backups = [backup for backup in self._backups.values() if backup.generation <= generation]
            for backup in backups:
                if backup.user:
                    backup.user.cut()
        for backup in backups:
            # A connection that still allocates memory for a backup does not end in this time; the fence prevents its
            # commit.
            if backup.turn.acquire(timeout=TAKE_OVER_S):
                backup.give_up()
                backup.turn.release()

    def close(self) -> None:
        """Accept nothing more, because the job is over or the agent ends; files are unmapped and stay."""
        with self._lock:
            self._closed = True
            backups = list(self._backups.values())
            for backup in backups:
                if backup.user:
                    backup.user.cut()
        for backup in backups:
            with backup.turn:
                backup.close()

    def require(self, size: int, rank: int) -> None:
        """Make sure that there is room for a file; stale backups are removed if necessary.

        Raises:
            BackupRefused: there is too little room (the message has the numbers), or the folder is not private to the
                agent.
        """
        try:
            private.make_folder(self.shm)  # an offer may arrive before this machine's own Launch
        except ConfigError as error:
            raise BackupRefused(str(error)) from error
        if size > self._room():
            self.remove_stale(None)
        if size > (room := self._room()):
            raise BackupRefused(
                f"no room for the backup of rank {rank}: it needs {size_text(size)}, and {size_text(room)} are "
                f"free in {self.shm.parent}. Make /dev/shm larger, use fewer slots, or turn backups off"
            )

    def _room(self) -> int:
        return min(free(self.shm), memory_available())

    def remove_stale(self, before: int | None) -> bool:
        """Remove backups of ranks that send to another machine since the newest Launch.

        This machine gets no list of these ranks. So a backup counts as stale if other ranks have sent in the newest
        generation and its rank has not. A stale backup is still kept as long as a restart might need it.

        Args:
            before: Remove only backups whose steps are all older than this step, the oldest one that this machine's own
                ranks still have. A restart cannot need older steps. None: remove all stale backups, because room is
                needed.

        Returns:
            Whether there may still be stale backups.
        """
        with self._lock:
            newest = max((backup.generation for backup in self._backups.values()), default=0)
        if newest < self._launched:
            return True
        left = False
        for rank in backup_files(self.shm):
            backup = self._backup(rank)
            if backup.generation >= newest:
                continue
            left = not self._remove(backup, before) or left
        return left

    def _remove(self, backup: Backup, before: int | None) -> bool:
        if not backup.turn.acquire(blocking=False):
            return False
        try:
            steps = [header.completed_steps for header in backup.headers()]
            if before is not None and max(steps, default=-1) >= before:
                return False
            logger.info("removing a backup that its rank keeps elsewhere now", path=str(backup.path), steps=steps)
            backup.close()
            backup.path.unlink(missing_ok=True)
            return True
        finally:
            backup.turn.release()

    def _backup(self, rank: int) -> Backup:
        with self._lock:
            if rank not in self._backups:
                self._backups[rank] = Backup(backup_slots(self.shm, rank), self.owner(rank))
            return self._backups[rank]
