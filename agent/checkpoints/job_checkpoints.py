"""This module copies the training state of one job on this machine, between a launch and its stop.

Between Launch and Stop, a watch detects each save and notifies the sender and the lower tiers, and backups from other
machines are accepted. Calls may wait for threads and disks, so the runner makes them in a thread, one call at a time.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Literal

import structlog

from agent.checkpoints.options import LaunchOptions, Place, saves_of
from agent.checkpoints.peers.backups import PeerBackups
from agent.checkpoints.peers.exchange import Exchange
from agent.checkpoints.peers.fetch import copy_slot, fetch_range, fetch_slot
from agent.checkpoints.peers.sender import Sender
from agent.checkpoints.save_watch import SaveWatch, backup_files, make_fifo, own_files
from agent.checkpoints.tiers.job_tiers import JobTiers
from agent.checkpoints.tiers.open_with_timeout import TiersWithTimeout
from agent.v1 import agent_pb2 as pb
from everstep.errors import CheckpointError, CorruptCheckpoint
from everstep.slots.file import SlotFile
from everstep.slots.format import DAMAGED, Pin, SlotHeader, backup_slots, own_slots, same_save
from everstep.slots.owner import SlotOwner
from everstep.slots.reader import SlotReader, held
from everstep.system import private_files as private

logger = structlog.get_logger()


class JobCheckpoints:
    """Copies the training state of one job; each ``JobRunner`` has one instance.

    Args:
        place: Locations of the job's copies.
        exchange: The agent's exchange with other agents.
        fenced: The newest generation that was stopped.
    """

    def __init__(self, place: Place, exchange: Exchange, fenced: int) -> None:
        self.place = place
        self.opened: LaunchOptions | None = None
        """The checkpoint options of the generation that runs; None: nothing is copied."""
        self.received = PeerBackups(place.shm, place.owner, fenced)
        self.tiers = JobTiers(place, self._fetch_range)
        self._with_timeout = TiersWithTimeout(self.tiers, place.saved)
        self._cards = exchange.cards
        self._connect = partial(exchange.connect, run=place.run)
        self._save_watch: SaveWatch | None = None
        self._sender: Sender | None = None
        self._stale = False
        """Whether backups may exist that are no longer needed."""
        self.disk_asked: int | None = None
        """The newest step that a Persist requested since the launch; 0: no step; None: not known after a restart."""
        self._log = logger.bind(job=place.job)

    # From Launch to Stop.

    def launch(self, launch: LaunchOptions, unforked: set[int]) -> None:
        """Delete the copies that this generation abandons, then open.

        Args:
            launch: Checkpoint options of the Launch.
            unforked: Ranks of the launch that do not run yet, so that only the agent writes their files.
        """
        self._shut()
        for rank, path in own_files(self.place.shm).items():
            if rank in unforked:
                self._discard_own(rank, path, launch.resume_step)
        self.received.launch(launch.generation, launch.resume_step)
        self.place.saved.clear()
        self._stale = True
        self.disk_asked = 0
        self.open(launch)

    def open(self, launch: LaunchOptions) -> None:
        """Start sending and writing, also after a restart of the agent."""
        self.opened = launch
        make_fifo(self.place.shm)
        self._with_timeout.open(launch)
        self._sender = Sender(self.place, launch, self._connect, self._cards)
        subscribers = [self._saved, self._with_timeout.on_saved, self._sender.on_saved]
        self._save_watch = SaveWatch(self.place, subscribers, on_held=self.place.saved.held)
        self._sender.start()
        self._save_watch.start()

    def stop(self, generation: int) -> None:
        """Stop all copying for this generation and older ones. When this returns, nothing is copied any more."""
        self.received.stop(generation)
        if self.opened and self.opened.generation <= generation:
            self._shut()

    def close(self) -> None:
        """End the threads and close the files, because the job is over on this machine or the agent ends."""
        self.received.close()
        self._shut()
        self.tiers.close()

    def _shut(self) -> None:
        self.opened = None
        if self._sender:
            self._sender.close()
        if self._save_watch:
            self._save_watch.close()
        self._with_timeout.shut()
        self._sender = self._save_watch = None

    # While the job runs.

    def align(self, request: pb.AlignBackupsRequest) -> None:
        """Back up the step that all machines back up; returns at once."""
        launch, sender = self.opened, self._sender
        if launch and sender and launch.generation == request.generation:
            for rank in launch.ranks:
                self.place.saved.update(rank, apart=request.apart)
            sender.align(request)

    def persist(self, request: pb.PersistRequest) -> None:
        """Write a future step to disk too, and keep the step that all ranks have on disk; returns at once."""
        if self.disk_asked is not None:
            self.disk_asked = max(self.disk_asked, request.step)
        self.tiers.persist(request)

    def _saved(self, rank: int, header: SlotHeader) -> None:
        self.place.saved.own(rank, header.completed_steps, header.saved_ns)
        if self._stale and (oldest := self._oldest_own()) is not None:
            self._stale = self.received.remove_stale(oldest)

    def _oldest_own(self) -> int | None:
        """Return the oldest step in the own slots of this machine's ranks."""
        steps = []
        for rank, path in own_files(self.place.shm).items():
            with (
                contextlib.suppress(OSError, CheckpointError),
                contextlib.closing(SlotReader(path, self.place.owner(rank))) as reader,
            ):
                steps += [header.completed_steps for header in reader.headers()]
        return min(steps, default=None)

    def _discard_own(self, rank: int, path: Path, resume_step: int) -> None:
        """Discard own slots of an abandoned future; the rank does this too, unless it is killed first."""
        owner = self.place.owner(rank)
        try:
            with contextlib.closing(SlotFile(path, owner=owner)) as file:
                file.discard_after(resume_step if resume_step > 0 else -1)
            with contextlib.closing(SlotReader(path, owner)) as reader:
                for pin in (Pin.BACKUP, Pin.NAMED, Pin.KEEP):  # the sender of this generation sets new pins
                    reader.unpin(pin)
        except (CheckpointError, OSError) as error:  # it is damaged, or was never written: the rank makes a new one
            self._log.warning("later steps of a checkpoint file are not forgotten", path=str(path), reason=str(error))

    # Listing.

    def in_memory(
        self, *, verify_own: bool = False, verify_backups: bool = False, own_bytes: int = 0
    ) -> list[pb.HeldCheckpoint]:
        """List every slot of the job's own files and of its backups for other machines; files are read in parallel.

        Args:
            verify_own: Also compare the checksums of the contents of own slots, without a time limit. Each core
                compares 5 to 8 GB/s (docs/concepts/checkpoints.md).
            verify_backups: Also compare the checksums of backups; a restore from a backup always verifies it.
            own_bytes: Compare the checksums of own slots if all own slots together have at most this many bytes.
        """
        own, backups = own_files(self.place.shm), backup_files(self.place.shm)
        copies = self._slots(own, pb.HeldCheckpoint.OWN, verify=verify_own)
        if not verify_own and sum(copy.bytes for copy in copies) <= own_bytes:
            copies = self._slots(own, pb.HeldCheckpoint.OWN, verify=True)
        return [*copies, *self._slots(backups, pb.HeldCheckpoint.BACKUP, verify=verify_backups)]

    def _slots(
        self, files: Mapping[int, Path], tier: pb.HeldCheckpoint.Tier.ValueType, *, verify: bool
    ) -> list[pb.HeldCheckpoint]:
        if not files:
            return []
        with ThreadPoolExecutor(min(len(files), os.cpu_count() or 1), thread_name_prefix="verify") as pool:
            listings = list(
                pool.map(
                    lambda rank, path: held(path, owner=self.place.owner(rank), verify=verify), files, files.values()
                )
            )
        return [
            pb.HeldCheckpoint(
                rank=rank,
                completed_steps=slot.completed_steps,
                bytes=slot.bytes,
                valid=slot.valid,
                reason=slot.reason,
                tier=tier,
                generation=slot.generation,
                saved_ns=slot.saved_ns,
                run=self.place.run,
                unverified=slot.valid and not verify,
            )
            for rank, slots in zip(files, listings, strict=True)
            for slot in slots
        ]

    # Restoring.

    def restore(self, shard: pb.ShardSource, options: pb.CheckpointOptions, fenced: int, threads: int = 1) -> int:
        """Copy one saved state into the own slot of its rank, which does not run; returns the number of bytes copied.

        Args:
            shard: The state, and where it is.
            options: The options of the job's checkpoints.
            fenced: The newest generation that was stopped.
            threads: Number of threads that verify a slot which has the state already (``hashing_threads``).

        Raises:
            CorruptCheckpoint: the copy is damaged or missing.
            AgentUnreachable, CheckpointError, OSError: the copy cannot be read now, or there is no room.
        """
        path, owner = own_slots(self.place.shm, shard.rank), self.place.owner(shard.rank)
        fault = _fault(path, owner, shard, threads)
        if not fault:
            return 0
        if shard.tier == pb.HeldCheckpoint.OWN and not shard.address:
            raise CorruptCheckpoint(fault)
        if shard.tier in {pb.HeldCheckpoint.DISK, pb.HeldCheckpoint.REMOTE}:
            return self.tiers.restore(shard, options, fenced)
        private.make_folder(path.parent)
        file: Literal["own", "backup"] = "own" if shard.tier == pb.HeldCheckpoint.OWN else "backup"
        with contextlib.closing(SlotFile(path, slots=slots_of(options), owner=owner)) as into:
            if not shard.address:
                return copy_slot(
                    backup_slots(self.place.shm, shard.rank), shard.completed_steps, into, saved=saves_of(shard)
                )
            card = self._cards.of(shard.local_rank)
            return fetch_slot(
                lambda: self._connect(shard.address, self.place.job, card),
                shard.rank,
                shard.completed_steps,
                file,
                into,
                saved=saves_of(shard),
                connections=max(1, options.transfer_connections),
            )

    def _fetch_range(self, address: str, job: str, rank: int, step: int, view: memoryview) -> SlotHeader:
        return fetch_range(lambda: self._connect(address, job, 0), rank, step, view)


def slots_of(options: pb.CheckpointOptions) -> int:
    """Return the number of slots of an own file; 2 if the options do not contain a number."""
    return options.slots or 2


def _fault(path: Path, owner: SlotOwner, shard: pb.ShardSource, threads: int) -> str:
    """Explain why a file does not hold exactly the chosen save with intact contents; empty: the file holds it.

    A Stop reports own slots by their headers alone, so this check must pass before a rank restores from such a slot.
    """
    missing = f"{path} does not hold step {shard.completed_steps}, or another save of it"
    try:
        with contextlib.closing(SlotReader(path, owner)) as reader:
            header = reader.header(shard.completed_steps)
            if header is None or not same_save(header, saves_of(shard)):
                return missing
            return "" if reader.intact(header, threads) else DAMAGED
    except FileNotFoundError:
        return missing
    except (OSError, CheckpointError) as error:
        return str(error)
