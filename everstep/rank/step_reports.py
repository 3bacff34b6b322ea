"""Defines the step reports of one rank: a mapped file that the rank writes and the agent reads.

Writing a report takes a few stores into mapped memory. It needs no system call and no lock, and never waits, even if
the agent is stopped or dead. The agent creates one file for each rank and generation.

Layout, little endian::

    0     magic 8s · version u32 · generation u32 · rank u32 · 0 u32 · capacity u64 · pid i64
    64    published i64 · attached i64 · finished i64 · completed_steps i64 · optimizer_steps i64 · optimizer_ns i64
    128   milestones 7 x i64 (forked, script_entered, joined, restored, first_step, loop_entered, loop_left), ns
    192   flops_per_token f64 · peak_flops f64 · derived i64; all are 0 if not known
    216   align_step i64 · asked_ns i64 · aligned_step i64 · can_align i64; all are 0 if the rank is not asked to wait
    248   asked_pace i64 · pace i64 · wanted i64 · save_s f64 · step_s f64 (``everstep/decisions/keep/save_pace.py``)
    320   ring of ``capacity`` records of 64 bytes:
          sequence u64 · step i64 · time_ns i64 · loss f64 · grad_norm f64 · tokens i64 · given u32
    end   64 bytes by which the kernel notifies the agent that the rank begins to end (``end_notice``)

Each field between 32 and 320 is a word that is read and written at once (``SharedWords``), so a reader never sees a
part of a number. The writer stores a record first and ``published`` last. A record is valid if its sequence fits its
position in the ring, so a reader drops records that were overwritten while it read. ``given`` has a bit for each number
that the script reported (``LOSS``, ``GRAD_NORM``). A number that the script did not report is stored as NaN; this NaN
is not a fault.

The agent writes only ``align_step``, ``asked_ns`` and ``asked_pace``. A rank that has completed ``align_step`` steps
waits at the end of its step, and reports that in ``aligned_step``. ``asked_ns`` is the time of the newest request, by
the machine's monotonic clock. A rank whose request is not renewed resumes by itself.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from everstep.errors import EverstepError
from everstep.model.save_pace import SavePace
from everstep.system import end_notice
from everstep.system.end_notice import EndNotice
from everstep.system.shared_words import SharedWords

MAGIC = b"EVSTRPT1"
VERSION = 3
RING = 320
RECORD_BYTES = 64
DEFAULT_CAPACITY = 4096
LOSS, GRAD_NORM = 1, 2
"""Bits of ``StepRecord.given``."""

_HEAD = struct.Struct("<8sIIIIQ")
_RECORD = struct.Struct("<QqqddqI")
_PID, _PUBLISHED, _ATTACHED, _FINISHED, _COMPLETED, _OPTIMIZER_STEPS, _OPTIMIZER_NS = 32, 64, 72, 80, 88, 96, 104
_MILESTONES, _PER_TOKEN, _PEAK, _DERIVED = 128, 192, 200, 208
_ALIGN_STEP, _ASKED_NS, _ALIGNED, _CAN_ALIGN = 216, 224, 232, 240
_ASKED_PACE, _PACE, _WANTED, _SAVE_S, _STEP_S = 248, 256, 264, 272, 280

Milestone = Literal["forked", "script_entered", "joined", "restored", "first_step", "loop_entered", "loop_left"]
MILESTONES: tuple[Milestone, ...] = get_args(Milestone)
_MILESTONE_AT = {name: _MILESTONES + 8 * i for i, name in enumerate(MILESTONES)}


class StepRecord(NamedTuple):
    """The report of a step."""

    step: int
    time_ns: int
    loss: float
    grad_norm: float
    tokens: int
    given: int = 0
    """The numbers that the script reported, as bits ``LOSS`` and ``GRAD_NORM``."""


REQUEST_VALID_S = 120.0
"""A rank that waits resumes if the request was not renewed within this time, seconds, since the worker is then gone."""


class Alignment(NamedTuple):
    """Whether a rank is asked to wait at the end of a step, and whether it waits."""

    step: int = 0
    """The rank has to wait once it has completed this many steps; 0: it does not have to wait."""
    asked_ns: int = 0
    """When that was requested last, nanoseconds of the machine's monotonic clock."""
    aligned: int = 0
    """Number of completed steps at which the rank waits, with its state saved; 0: it does not wait."""
    can: bool = False
    """Whether the rank checks these requests, which needs a script that numbers its steps."""

    def is_asked(self, completed_steps: int) -> bool:
        """Whether a rank with this number of completed steps has to wait now."""
        valid = time.monotonic_ns() - self.asked_ns <= REQUEST_VALID_S * 1e9
        return valid and 0 < self.step <= completed_steps


class SaveTimes(NamedTuple):
    """The distance between saves that a rank needs, and the times from which it follows."""

    wanted: int = 1
    """The distance, in steps."""
    save_s: float = 0.0
    """Time of its last save, seconds; 0: not known yet."""
    step_s: float = 0.0
    """Time of a step without saves, seconds; 0: not known yet."""


class Flops(NamedTuple):
    """The cost of a token for a rank, and the peak rate of its device, from which the MFU is computed."""

    per_token: float = 0.0
    """Floating point operations for one token; 0: not known."""
    peak: float = 0.0
    """Floating point operations that the rank's device can do in a second; 0: not known."""
    derived: bool = False
    """True: ``per_token`` is 6 for each parameter of this rank's share of the model. False: the script gave
    ``per_token`` for the whole model."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of a rank's reports."""

    generation: int
    rank: int
    pid: int
    published: int
    attached: bool
    finished: bool
    completed_steps: int
    """Steps completed since the job's beginning; -1: the script does not report."""
    optimizer_steps: int
    stepped_ns: int
    """When the rank last stepped, nanoseconds of its machine's clock; 0: never."""
    milestones: dict[str, int]
    newest: StepRecord | None
    flops: Flops

    @property
    def shown_steps(self) -> int:
        """Number of steps that the process showed: by reports, by the optimizer, or its first step in ``run.steps``."""
        return max(self.published, self.optimizer_steps, int(self.milestones["first_step"] > 0))


class ReportFile:
    """One rank's mapped report file."""

    def __init__(self, path: Path, mapped: mmap.mmap) -> None:
        self.path = path
        self._map = mapped
        magic, version, self.generation, self.rank, _, self.capacity = _HEAD.unpack_from(mapped, 0)
        if magic != MAGIC or version != VERSION or len(mapped) < _end_of_ring(self.capacity) + end_notice.ROOM:
            raise EverstepError(f"{path} is not a report file of version {VERSION}: delete it and start the rank again")
        self._words = SharedWords(mapped)
        self._published = self._words.get(_PUBLISHED)

    @classmethod
    def create(
        cls, path: Path, *, rank: int, generation: int, capacity: int = DEFAULT_CAPACITY, save_every: int = 1
    ) -> ReportFile:
        """Create the file, for a rank that begins to save every ``save_every`` steps.

        All of the file is allocated, so that no later write can fail.
        """
        size = _end_of_ring(capacity) + end_notice.ROOM
        temporary = path.with_name(path.name + ".new")
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, size)
            mapped = mmap.mmap(descriptor, size)
        except OSError:
            temporary.unlink()
            raise
        finally:
            os.close(descriptor)
        _HEAD.pack_into(mapped, 0, MAGIC, VERSION, generation, rank, 0, capacity)
        made = cls(path, mapped)
        made.complete(-1)
        made.ask_pace(SavePace(every=save_every))
        made.set_pace(SavePace(every=save_every))
        made.set_save_times(SaveTimes(save_every))
        temporary.rename(path)
        return made

    @classmethod
    def open(cls, path: Path) -> ReportFile:
        """Open an existing file, for the rank to write or the agent to read."""
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        try:
            if os.fstat(descriptor).st_size < RING:
                raise EverstepError(
                    f"{path} is shorter than a report file's header: delete it and start the rank again"
                )
            return cls(path, mmap.mmap(descriptor, 0))
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Unmap the file."""
        self._words.release()
        self._map.close()

    # The writer: the rank.

    def report(self, step: int, loss: float | None, grad_norm: float | None, tokens: int) -> None:
        """Publish a record without waiting; if the loss or the norm is None, it is not known."""
        given = (0 if loss is None else LOSS) | (0 if grad_norm is None else GRAD_NORM)
        loss, grad_norm = math.nan if loss is None else loss, math.nan if grad_norm is None else grad_norm
        sequence = self._published
        at = RING + sequence % self.capacity * RECORD_BYTES
        _RECORD.pack_into(self._map, at, sequence, step, time.time_ns(), loss, grad_norm, tokens, given)
        self._published = sequence + 1
        self._words.set(_PUBLISHED, sequence + 1)

    def arm_end_notice(self) -> bool:
        """Let the kernel notify the agent when this process begins to end; False: this system does not support it.

        The main thread of the rank calls this once. The file stays mapped from then on.
        """
        return end_notice.arm(self._map, _end_of_ring(self.capacity))

    def set_pid(self, pid: int) -> None:
        """Set the process id of this rank."""
        self._words.set(_PID, pid)

    def attach(self) -> None:
        """Report that the script uses everstep."""
        self._words.set(_ATTACHED, 1)
        self.mark("joined")

    def finish(self) -> None:
        """Report that the training loop ran to its end."""
        self._words.set(_FINISHED, 1)

    def complete(self, completed_steps: int) -> None:
        """Report the number of completed steps; the save of the newest one may not be committed yet."""
        self._words.set(_COMPLETED, completed_steps)

    def count_optimizer_step(self) -> int:
        """Count one ``optimizer.step()``; returns the count of this process."""
        count = self._words.get(_OPTIMIZER_STEPS) + 1
        self._words.set(_OPTIMIZER_NS, time.time_ns())
        self._words.set(_OPTIMIZER_STEPS, count)
        return count

    def set_flops(self, flops: Flops) -> None:
        """Set the cost of a token."""
        self._words.set_float(_PEAK, flops.peak)
        self._words.set(_DERIVED, flops.derived)
        self._words.set_float(_PER_TOKEN, flops.per_token)

    def mark(self, milestone: Milestone) -> None:
        """Record when the rank reached a milestone; only the first call counts."""
        at = _MILESTONE_AT[milestone]
        if not self._words.get(at):
            self._words.set(at, time.time_ns())

    def unmark(self, milestone: Milestone) -> None:
        """Withdraw a milestone that the rank did not reach after all."""
        self._words.set(_MILESTONE_AT[milestone], 0)

    def align_step(self) -> int:
        """The rank has to wait once it has completed this many steps; 0: it does not have to wait.

        The rank calls this in every step.
        """
        return self._words.get(_ALIGN_STEP)

    def set_aligned(self, completed_steps: int) -> None:
        """Report that this rank waits, and that its state after this number of steps is saved; 0: it does not wait."""
        self._words.set(_ALIGNED, completed_steps)

    def can_align(self) -> None:
        """Report that this rank checks at the end of every step whether it has to wait."""
        self._words.set(_CAN_ALIGN, 1)

    def asked_pace(self) -> SavePace:
        """The pace to which the rank is asked to move. The rank and the agent call this."""
        return _unpacked(self._words.get(_ASKED_PACE))

    def set_pace(self, pace: SavePace) -> None:
        """Report the pace to which this rank has moved."""
        self._words.set(_PACE, _packed(pace))

    def set_save_times(self, times: SaveTimes) -> None:
        """Report the distance between saves that this rank needs."""
        self._words.set_float(_SAVE_S, times.save_s)
        self._words.set_float(_STEP_S, times.step_s)
        self._words.set(_WANTED, times.wanted)

    # The reader: the agent.

    def ask_pace(self, pace: SavePace) -> None:
        """Ask the rank to move to a pace."""
        self._words.set(_ASKED_PACE, _packed(pace))

    def pace(self) -> SavePace:
        """The pace to which the rank has moved."""
        return _unpacked(self._words.get(_PACE))

    def save_times(self) -> SaveTimes:
        """The distance between saves that the rank needs."""
        words = self._words
        return SaveTimes(words.get(_WANTED), words.get_float(_SAVE_S), words.get_float(_STEP_S))

    def align(self, step: int) -> None:
        """Ask the rank to wait once it has completed ``step`` steps; 0: ask it to wait no longer."""
        self._words.set(_ASKED_NS, time.monotonic_ns())
        self._words.set(_ALIGN_STEP, step)

    def alignment(self) -> Alignment:
        """Whether the rank is asked to wait, and whether it waits."""
        get = self._words.get
        return Alignment(get(_ALIGN_STEP), get(_ASKED_NS), get(_ALIGNED), bool(get(_CAN_ALIGN)))

    def snapshot(self) -> Snapshot:
        """The state of the reports now."""
        get = self._words.get
        published = get(_PUBLISHED)
        newest = self.records(published - 1)[1] if published else []
        return Snapshot(
            generation=self.generation,
            rank=self.rank,
            pid=get(_PID),
            published=published,
            attached=bool(get(_ATTACHED)),
            finished=bool(get(_FINISHED)),
            completed_steps=get(_COMPLETED),
            optimizer_steps=get(_OPTIMIZER_STEPS),
            stepped_ns=max(get(_OPTIMIZER_NS), newest[-1].time_ns if newest else 0),
            milestones={name: get(at) for name, at in _MILESTONE_AT.items()},
            newest=newest[-1] if newest else None,
            flops=self._flops(),
        )

    def end_notice(self) -> EndNotice | None:
        """The kernel's notice that the rank begins to end; None: the file is gone."""
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:
            return None
        try:
            return EndNotice(descriptor, _end_of_ring(self.capacity))
        finally:
            os.close(descriptor)

    def records(self, start: int) -> tuple[int, list[StepRecord]]:
        """Records from sequence ``start`` on.

        Returns:
            The sequence for the next call, and the records, oldest first. Only the last ``capacity`` - 1 records can be
            read; older ones are left out.
        """
        published = self._words.get(_PUBLISHED)
        records: list[tuple[int, StepRecord]] = []
        for sequence in range(max(start, published - self.capacity, 0), published):
            at = RING + sequence % self.capacity * RECORD_BYTES
            stored, *fields = _RECORD.unpack_from(self._map, at)
            if stored == sequence:
                records.append((sequence, StepRecord(*fields)))
        # The writer may have overwritten the oldest of these records, and half of the one after them, while we read.
        safe = self._words.get(_PUBLISHED) - self.capacity
        return published, [record for sequence, record in records if sequence > safe]

    def _flops(self) -> Flops:
        words = self._words
        return Flops(words.get_float(_PER_TOKEN), words.get_float(_PEAK), bool(words.get(_DERIVED)))


def _packed(pace: SavePace) -> int:
    """A pace in one word, so that it is read and written at once."""
    return pace.number << 33 | pace.every << 1 | pace.waits


def _unpacked(word: int) -> SavePace:
    return SavePace(word >> 33, word >> 1 & (1 << 32) - 1, bool(word & 1))


def _end_of_ring(capacity: int) -> int:
    return RING + capacity * RECORD_BYTES
