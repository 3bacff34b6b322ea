"""This module writes the due steps of this machine's ranks to disk while the ranks train.

One thread writes the files in sequence. The slot that is being written is pinned, so that the rank's saves use other
slots; if the pin comes too late, the step is skipped, and this is reported. Training continues after any failure, and
the next due step is written. A requested step replaces a step that is written only because it is due, since all
machines write the requested step, whatever the speed of their disks.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import structlog

from agent.checkpoints.options import LaunchOptions, Place
from agent.checkpoints.tiers.background import Gate, yield_the_disk
from agent.checkpoints.tiers.retention import DiskRetention
from everstep.base.text import size_text
from everstep.decisions.keep.next_copy import NextDiskStep, next_disk_step, stride_after
from everstep.errors import CorruptCheckpoint, EverstepError
from everstep.shards.file import write_shard
from everstep.shards.folders import step_folder
from everstep.slots.format import Pin, SlotHeader, own_slots
from everstep.slots.reader import SlotReader
from everstep.system.bulk_threads import yield_the_core

SHUT_PATIENCE_S = 5.0
"""Stop waits at most this long, seconds, for a file that is just getting its final name: the disk may hang."""

logger = structlog.get_logger()


@dataclass
class _Step:
    """A step that is being written to disk."""

    number: int
    waiting: set[int]
    """Ranks that have not reached the step yet."""
    newest: int
    """The newest step of any rank when writing began; after a restart of the agent it may be later than ``number``."""
    ready: deque[tuple[int, SlotHeader]] = field(default_factory=deque)
    """Ranks whose slot is pinned."""
    left: set[int] = field(default_factory=set)
    """Ranks whose file is not written yet."""
    began: float = field(default_factory=time.monotonic)
    bytes: int = 0


class DiskWriter:
    """The disk tier of one job on this machine. All methods except ``shut`` and ``close`` return at once.

    Args:
        place: Locations of the job's copies.
        report: Called with the reason if writing fails, and with an empty text after a success.
        on_complete: Called in the writer's thread when a step is complete for all ranks of this machine.
        retention: Records which steps are on disk, and up to which step this list is complete.
    """

    def __init__(
        self,
        place: Place,
        report: Callable[[str], None],
        on_complete: Callable[[int], None],
        retention: DiskRetention,
    ) -> None:
        self._place = place
        self._report = report
        self._on_complete = on_complete
        self._retention = retention
        self._changed = threading.Condition(threading.RLock())
        self._launch: LaunchOptions | None = None
        self._root = place.state_dir
        self._readers: dict[int, SlotReader] = {}
        self._held: dict[int, dict[int, SlotHeader]] = {}
        self._asked: set[int] = set()
        self._done = -1
        self._stride = 1
        self._step: _Step | None = None
        self._gate = Gate()
        self._closing = False
        self._thread: threading.Thread | None = None

    def open(self, launch: LaunchOptions, root: Path, done: int) -> None:
        """Start to write, also after a restart of the agent.

        Args:
            launch: Checkpoint options of the generation.
            root: Folder of the checkpoints of all jobs; nothing is written if it does not exist.
            done: The newest step that is on disk for all ranks of this machine, or was given up; -1: none.
        """
        with self._changed:
            self._launch, self._root, self._done, self._stride = launch, root, done, 1
            self._asked.clear()
            self._held = {rank: {} for rank in launch.ranks}
            for rank in launch.ranks:
                self._read_steps(rank)
                self._unpin(rank)  # an agent that was killed during a write left the pin
            self._wanted()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"disk {self._place.job}", daemon=True)
                self._thread.start()
            self._advance()

    def on_saved(self, rank: int) -> None:
        """Handle a slot that a rank of this machine committed."""
        with self._changed:
            if self._launch is not None and rank in self._held:
                self._read_steps(rank)
                self._advance()

    def persist(self, step: int) -> None:
        """Write a future step, or a step that all ranks hold now, whether or not it is due."""
        with self._changed:
            if self._launch is None or step <= self._done:
                return
            self._asked.add(step)
            self._retention.named(step)
            for rank in self._held:
                self._read_steps(rank)
            self._advance()

    def shut(self) -> None:
        """Give up the current step. After this method nothing is written to disk; old steps may still be deleted."""
        with self._changed:
            self._launch, gate = None, self._gate
            self._drop()
            self._asked.clear()
        if not gate.end(SHUT_PATIENCE_S):
            logger.error("a disk hangs while a checkpoint is written", job=self._place.job, folder=str(self._root))

    def close(self) -> None:
        """End the thread; the current file is given up."""
        self.shut()
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            thread, self._thread = self._thread, None
        if thread:
            thread.join(SHUT_PATIENCE_S)
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()

    # Under the lock: the steps that are due.

    def _read_steps(self, rank: int) -> None:
        """Read the steps that a rank holds now."""
        assert self._launch
        try:
            if rank not in self._readers:
                self._readers[rank] = self._reader(rank)
            headers = self._readers[rank].headers()
        except (OSError, CorruptCheckpoint):  # the file is missing or being replaced; Stop reports damaged files
            headers = []
        self._held[rank] = {header.completed_steps: header for header in headers if not self._launch.abandons(header)}

    def _advance(self) -> None:
        """Begin the next step if none is being written, and pin its slots on the ranks that have reached it."""
        assert self._launch
        self._make_way()
        if self._step is None:
            choice = self._choose(self._launch.options.disk_every_steps)
            for step, reason in choice.gone.items():
                self._asked.discard(step)
                self._report(reason)
            self._wanted()
            if choice.step is None:
                return
            ranks = set(self._held)
            self._step = _Step(choice.step, ranks, self._newest(), left=set(ranks))
            self._retention.passed(choice.step - 1)
        begun = self._step
        for rank in sorted(begun.waiting):
            header = self._held[rank].get(begun.number)
            if header and self._pin(rank, begun.number):
                begun.waiting.discard(rank)
                begun.ready.append((rank, header))
            elif header or max(self._held[rank], default=-1) > begun.number:
                self._give_up(f"rank {rank} overwrote it in memory before it was pinned")
                return
        self._changed.notify_all()

    def _newest(self) -> int:
        return max((max(steps, default=-1) for steps in self._held.values()), default=-1)

    def _choose(self, every: int) -> NextDiskStep:
        held = {rank: sorted(steps) for rank, steps in self._held.items()}
        return next_disk_step(held, every=every, stride=self._stride, asked=self._asked, done=self._done)

    def _make_way(self) -> None:
        """If a requested step can be written now, end a step that is written only because it is due."""
        if self._step is None or self._step.number in self._asked or not self._asked:
            return
        if self._choose(every=0).step is not None:
            logger.info("a requested step replaces a due step", job=self._place.job, step=self._step.number)
            self._end_step()

    def _give_up(self, reason: str) -> None:
        """End the step and report the reason; the next due step is tried."""
        assert self._step
        step = self._step.number
        logger.warning("a step does not go to disk", job=self._place.job, step=step, reason=reason)
        self._report(f"step {step} is not on disk: {reason}")
        self._end_step()

    def _end_step(self) -> None:
        assert self._step
        self._done = max(self._done, self._step.number)
        self._asked.discard(self._step.number)
        self._wanted()
        self._gate.end(0)
        self._drop()
        self._retention.passed(self._done)

    def _drop(self) -> None:
        self._step = None
        for rank in self._held:
            self._unpin(rank)

    def _reader(self, rank: int) -> SlotReader:
        return SlotReader(own_slots(self._place.shm, rank), self._place.owner(rank))

    def _pin(self, rank: int, step: int) -> bool:
        with contextlib.suppress(OSError, CorruptCheckpoint):
            return self._readers[rank].pin(Pin.DISK, step)
        return False

    def _unpin(self, rank: int) -> None:
        with contextlib.suppress(OSError, CorruptCheckpoint, KeyError):
            self._readers[rank].unpin(Pin.DISK)

    def _wanted(self) -> None:
        for rank in self._held:
            self._place.saved.update(rank, disk_wanted=min(self._asked, default=-1))

    # The thread.

    def _run(self) -> None:
        yield_the_core()
        yield_the_disk()
        while True:
            with self._changed:
                while not self._closing and not (self._step and self._step.ready):
                    self._changed.wait()
                if self._closing:
                    return
                assert self._step and self._launch
                step, launch, root = self._step, self._launch, self._root
                rank, header = step.ready.popleft()
                gate = self._gate = Gate()
            problem = self._write(rank, header, launch, root, gate)
            with self._changed:
                is_complete = self._step is step and self._written(step, rank, header, problem)
            if is_complete:
                try:
                    self._on_complete(step.number)
                except Exception as error:  # the next step is still written
                    logger.error(
                        "a step is on disk, but the work that follows it failed", job=self._place.job, exc_info=error
                    )

    def _write(self, rank: int, header: SlotHeader, launch: LaunchOptions, root: Path, gate: Gate) -> str:
        """Write a file; returns why it could not be written, empty: it is complete."""
        if not root.is_dir():
            return f"{root} does not exist on {self._place.machine}: make it, or mount it"
        try:
            reader = self._reader(rank)
            try:
                write_shard(
                    step_folder(root, self._place.job, header.completed_steps),
                    owner=reader.owner,
                    topology=launch.topology,
                    code_version=self._place.version_of(header.generation),
                    header=header,
                    read=partial(reader.read_into, header),
                    pace=gate,
                )
            finally:
                reader.close()
        except (EverstepError, OSError) as error:
            return str(error)
        except Exception as error:
            logger.error("a checkpoint cannot be written to disk", job=self._place.job, rank=rank, exc_info=error)
            return f"{type(error).__name__}: {error}"
        finally:
            gate.leave()
        return ""

    def _written(self, step: _Step, rank: int, header: SlotHeader, problem: str) -> bool:
        """Record that a file is written, or failed; returns whether the step is now complete. Under the lock."""
        if problem:
            self._give_up(problem)
            self._advance()
            return False
        self._unpin(rank)
        step.left.discard(rank)
        step.bytes += header.payload_bytes
        if not step.left:
            # This state is set before the last rank's file is reported, because readers of the report rely on it.
            self._done = max(self._done, step.number)
            self._retention.wrote(step.number)
            self._asked.discard(step.number)
            self._wanted()
        self._place.saved.on_disk(rank, step.number, time.monotonic() - step.began)
        if step.left:
            return False
        assert self._launch
        seconds = time.monotonic() - step.began
        lasted = self._newest() - max(step.number, step.newest)
        self._report(self._keep_up(self._launch.options.disk_every_steps, step, lasted, seconds))
        logger.info("a step is on disk", job=self._place.job, step=step.number, seconds=round(seconds, 2))
        self._drop()
        self._advance()
        return True

    def _keep_up(self, every: int, step: _Step, lasted: int, seconds: float) -> str:
        """Adapt the distance between due steps to the speed of the disk; returns the problem to report, empty: none."""
        if not every:
            return ""
        self._stride = stride_after(every, lasted)
        if self._stride == 1:
            return ""
        return (
            f"the disk is slow: {lasted} steps went by while step {step.number} was written ({size_text(step.bytes)} "
            f"in {seconds:.1f} s). Only every {every * self._stride}th step is written: set disk_every_steps to "
            f"{every * self._stride} or more, or give a faster disk_path"
        )
