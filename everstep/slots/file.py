"""Writes the checkpoint file of one rank: slots in shared memory that outlive the rank.

A file in ``/dev/shm`` has N slots, each for the state of the rank after a number of completed steps. A save uses the
least needed slot. It clears the slot's header first and writes the header last, so that a kill during a save never
costs an older step.

Two slots suffice if training waits for each copy and every step has a collective of all ranks: when a rank begins the
save of step n, all ranks have committed step n - 1. An overlapped copy needs three slots. After the same collective,
another rank may still write step n - 1, and its newest step is n - 2. So with three slots or more, a save overwrites
neither the newest step nor the step before it, whatever is pinned. Every further slot keeps one pinned step.

The agent reads the same file while the rank trains (``SlotReader``). It *pins* the steps that it sends, writes to disk
or keeps. A save overwrites a pinned slot only if no other slot is left, and never waits for a pin. A received backup is
a file of the same format.

``everstep/slots/format.py`` has the layout, and ``mapping.py`` maps the file.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from everstep.errors import CheckpointError, CorruptCheckpoint
from everstep.slots.checksum import PayloadChecksum
from everstep.slots.format import (
    EMPTY,
    I64,
    MAX_SLOTS,
    PINS_AT,
    SAVED,
    SAVING,
    Pin,
    SlotHeader,
    StoredSlot,
    aligned,
    inspect_slot,
)
from everstep.slots.mapping import Region, SlotMapping
from everstep.slots.owner import SlotOwner
from everstep.system.pages import STRIDE


@dataclass(frozen=True, slots=True)
class Payload:
    """The contents of a committed slot."""

    completed_steps: int
    generation: int
    tensors: memoryview
    """A view of the mapped file; data that is kept has to be copied."""
    structure: bytes


class SlotFile(SlotMapping):
    """A checkpoint file for its writer. Only one process writes, and has one save at a time.

    Args:
        path: The file; the first save makes it if it does not exist.
        slots: Number of slots of a new file, 2 to 64. An existing file keeps its own number.
        owner: The rank whose states the file has. A file of another owner is refused by ``load``, and replaced by the
            next save. None: ``SlotOwner.outside_a_job``.
        generation: Generation of the job to which this process belongs.
        threads: Number of threads that compute a checksum (``hashing_threads``).

    Raises:
        CheckpointError: too few or too many slots, or the file cannot be opened.
    """

    def __init__(
        self,
        path: Path,
        *,
        slots: int = 3,
        owner: SlotOwner | None = None,
        generation: int = 0,
        threads: int = 1,
    ) -> None:
        if not 2 <= slots <= MAX_SLOTS:
            raise CheckpointError(f"{slots} checkpoint slots: use 2 to {MAX_SLOTS}; with one, a kill loses everything")
        super().__init__(path, slots, owner or SlotOwner.outside_a_job(path))
        self.generation = generation
        self.threads = threads
        self._saving: tuple[int, int, int] | None = None

    # Saving.

    def begin(
        self,
        structure: bytes | tuple[bytes, ...],
        tensor_bytes: int,
        *,
        parts: Iterable[tuple[int, int]] | None = None,
    ) -> int:
        """Start a save: clear the header of the least needed slot, and store the structure in it.

        If there is no file, it is made. If the state does not fit into the slot, the slot grows; others are kept.

        Args:
            structure: The structure, or its pieces.
            tensor_bytes: Bytes of the tensors.
            parts: Offset and size of each part of the tensors that is written before ``make_present`` is called, bytes.
                Only they are allocated now, which takes no time that grows with the slot. None: the complete slot is
                allocated now.

        Returns:
            Address of ``tensor_bytes`` writable bytes, valid until ``commit``.

        Raises:
            CheckpointError: the file system has no room. The committed slots are untouched; only if another process
                took the memory while the slot grew, the least needed slot is lost.
        """
        pieces = structure if isinstance(structure, tuple) else (structure,)
        at, size = aligned(tensor_bytes), sum(map(len, pieces))
        payload = self._claim(tensor_bytes, size, None if parts is None else chain(((at, size),), parts))
        with payload:
            for piece in pieces:
                payload[at : at + len(piece)] = piece
                at += len(piece)
        return self._regions[self._begun()[0]].address

    def _claim(self, tensor_bytes: int, structure_bytes: int, parts: Iterable[tuple[int, int]] | None) -> memoryview:
        """Clear the header of the least needed slot, and allocate these parts of it, or all of it; returns the slot's
        payload."""
        need = aligned(tensor_bytes) + structure_bytes
        if not self.is_mapped:
            self._make()
        if self._replaced:  # the last save was given up before its slot was allocated
            with self._memory:
                self._free_replaced()
        index = by_need(self._steps, self._pins())[0]
        if not self._regions[index].fits(need):
            self._grow(index, need)
        region = self._regions[index]
        if parts is None:
            self._extend(region, region.room)  # before the slot is changed, since it may raise an error
        else:
            self._allocate_parts(region, parts)
        self._store(
            index,
            StoredSlot(
                generation=self.generation,
                phase=SAVING,
                tensor_bytes=tensor_bytes,
                structure_bytes=structure_bytes,
                at=region.at,
                room=region.room,
            ),
        )
        self._saving = (index, tensor_bytes, structure_bytes)
        return self._payload(index, need)

    def _payload(self, index: int, size: int) -> memoryview:
        """The first bytes of a slot's region, as a view of the mapping."""
        memory = self._regions[index].memory
        assert memory is not None
        return memoryview(memory)[:size]

    def make_present(self, stop: int | None = None) -> None:
        """Allocate the slot of the current save and map its pages, so that its writer waits for no page fault.

        Args:
            stop: Number of bytes of the payload, from its beginning; None: all.

        Raises:
            CheckpointError: the file system has no room. The save cannot be committed, and the old contents of its slot
                are lost; other slots are untouched.
        """
        index, tensor_bytes, structure_bytes = self._begun()
        need = aligned(tensor_bytes) + structure_bytes
        self._extend(self._regions[index], min(need, need if stop is None else stop), present=True)

    def prepare(self) -> bool:
        """Allocate a piece of a slot and map its pages, so that later saves do not wait for that.

        The slot of the next save comes first. A separate thread calls this between saves; a call takes some ms.

        Returns:
            Whether to call it again. False if nothing is left to do, or if there is no room; in that case a save raises
            the error.
        """
        for region in self.regions():
            if region.present < region.room:
                try:
                    self._extend(region, region.present + STRIDE, present=True)
                except (CheckpointError, OSError):  # no room, or the file was closed meanwhile
                    return False
                return True
        return False

    def regions(self) -> list[Region]:
        """The regions of the slots that have one, in the order in which saves will use them."""
        if self._words is None:
            return []
        order, saving = by_need(self._steps, self._pins()), self._saving
        if saving is not None:
            order.sort(key=saving[0].__eq__)  # the slot of a save that has begun is used again last
        regions = [self._regions[index] for index in order]
        return [region for region in regions if region.memory is not None]

    def allocated_region(self, address: int) -> Region:
        """The region of the slot at an address, of which all memory is allocated.

        Raises:
            CheckpointError: the file system has no room.
        """
        region = next(region for region in self.regions() if region.address == address)
        self._extend(region, region.room)
        return region

    def tensors(self) -> memoryview:
        """The writable tensor bytes of the current save, as a view of the mapping."""
        index, tensor_bytes, _ = self._begun()
        return self._payload(index, tensor_bytes)

    def commit(self, completed_steps: int) -> SlotHeader:
        """End the save: compute the checksum and write the header. The number of completed steps is written last.

        Raises:
            CheckpointError: no save has begun, or the count is negative.
        """
        index, tensor_bytes, structure_bytes = self._begun()
        if completed_steps < 0:
            raise CheckpointError(f"cannot save a state after {completed_steps} steps: the count starts at 0")
        checksum = PayloadChecksum()
        with self._payload(index, aligned(tensor_bytes) + structure_bytes) as payload:
            checksum.update(payload, self.threads)
        value = checksum.value(self.owner, completed_steps)
        header = SlotHeader(completed_steps, self.generation, tensor_bytes, structure_bytes, value, time.time_ns())
        self._commit(index, header)
        return header

    def abort(self) -> None:
        """Give up the current save, if there is one; its slot stays empty."""
        self._saving = None

    # Receiving a copy of another file's slot.

    def receive(self, header: SlotHeader, *, allocate: bool = True) -> memoryview:
        """Start to receive a copy of another file's slot; returns the writable payload of ``header.payload_bytes``.

        Args:
            header: The header of the other file's slot.
            allocate: Allocate the complete slot now. If False, ``make_present`` has to allocate bytes before a write.

        Raises:
            CheckpointError: the file system has no room; the committed slots are untouched.
        """
        return self._claim(header.tensor_bytes, header.structure_bytes, None if allocate else ())

    def commit_received(
        self, header: SlotHeader, checksum: PayloadChecksum, *, origin: SlotOwner | None = None
    ) -> SlotHeader:
        """Commit the slot that ``receive`` began; returns its header.

        Args:
            header: The header of the other file's slot.
            checksum: Checksum of the received payload.
            origin: The owner of the other file, if it is of another job or run; None: this file's owner.

        Raises:
            CorruptCheckpoint: the checksum differs from the header's; the slot stays empty.
        """
        index, _, _ = self._begun()
        origin, steps = origin or self.owner, header.completed_steps
        if checksum.value(origin, steps) != header.checksum:
            self._saving = None
            raise CorruptCheckpoint(
                f"the copy of the state after step {steps} does not match its checksum: it is damaged, or it is not "
                f"the state of {origin}"
            )
        ours = replace(header, checksum=checksum.value(self.owner, steps))
        self._commit(index, ours)
        return ours

    def _commit(self, index: int, header: SlotHeader) -> None:
        self.forget(header.completed_steps)  # each step has at most one slot
        region = self._regions[index]
        self._store(
            index,
            StoredSlot(
                header.completed_steps,
                header.generation,
                SAVED,
                header.tensor_bytes,
                header.structure_bytes,
                header.checksum,
                header.saved_ns,
                region.at,
                region.room,
            ),
        )
        self._saving = None

    def discard_after(self, completed_steps: int) -> None:
        """Forget slots of later steps.

        A job that resumes from a step computes the later steps again. Slots of the abandoned steps must never be
        combined with slots of the new steps.
        """
        for index, steps in enumerate(self._steps):
            if steps > completed_steps:
                self._forget(index)

    def forget(self, completed_steps: int) -> None:
        """Forget the slot of a step; nothing happens if there is none."""
        if completed_steps >= 0 and completed_steps in self._steps:
            self._forget(self._steps.index(completed_steps))

    def _forget(self, index: int) -> None:
        region = self._regions[index]
        self._store(index, StoredSlot(at=region.at, room=region.room))

    def _pins(self) -> dict[Pin, int]:
        assert self._words is not None
        return {why: self._words.get(PINS_AT + I64.size * why) for why in Pin}

    # Loading.

    def load(self, completed_steps: int, *, verify: bool = True) -> Payload:
        """Return the state after a number of completed steps.

        Args:
            completed_steps: Completed steps of the state.
            verify: Compare the checksum now. If False, the caller has to call ``verify`` before it uses the state.

        Raises:
            CheckpointError: no slot has that step.
            CorruptCheckpoint: the slot's header, length or checksum is wrong.
        """
        if completed_steps < 0 or completed_steps not in self._steps:
            steps = ", ".join(map(str, sorted(step for step in self._steps if step >= 0))) or "none"
            message = f"{self.path} does not have the state after step {completed_steps} (it has: {steps})"
            if self._damage:
                raise CorruptCheckpoint(
                    f"{message}; it is damaged: {'; '.join(self._damage)}. Start from an older step"
                )
            raise CheckpointError(f"{message}. Start from a step that all ranks have, or from the beginning")
        index = self._steps.index(completed_steps)
        self._require(index, (lambda: self._checksum_of(index, ())) if verify else None)
        slot = self._stored(index)
        view, start = self._payload(index, slot.payload_bytes), aligned(slot.tensor_bytes)
        return Payload(completed_steps, slot.generation, view[: slot.tensor_bytes], bytes(view[start:]))

    def verify(self, completed_steps: int, ends: Iterable[int] = ()) -> None:
        """Compare the checksum of a state that was loaded; other threads run meanwhile.

        Args:
            completed_steps: Completed steps of the state.
            ends: Offsets in the payload. The next offset is requested only when the payload up to the previous offset
                is hashed. So another thread can copy bytes while they are hashed, as long as they are in the cache.

        Raises:
            CorruptCheckpoint: the checksum differs.
        """
        index = self._steps.index(completed_steps)
        self._require(index, lambda: self._checksum_of(index, ends))

    def _checksum_of(self, index: int, ends: Iterable[int]) -> int:
        """The checksum of a slot's payload as it is now."""
        slot, checksum, done = self._stored(index), PayloadChecksum(), 0
        with self._payload(index, slot.payload_bytes) as payload:
            for end in ends:
                if done < end <= len(payload):
                    checksum.update(payload[done:end])
                    done = end
            checksum.update(payload[done:], self.threads)
        return checksum.value(self.owner, slot.completed_steps)

    def _require(self, index: int, checksum: Callable[[], int] | None) -> None:
        """Raise an error if a slot is damaged; None: its contents are not checked."""
        info = inspect_slot(self._stored(index), self._regions[index].room, checksum)
        if not info.valid:
            raise CorruptCheckpoint(
                f"{self.path}: the state after step {self._steps[index]} is damaged: {info.reason}. "
                "Start from an older step, or from the beginning"
            )

    def close(self) -> None:
        """Unmap the file, which is kept. The memory of a view that still exists is unmapped with the view."""
        self._saving = None
        super().close()

    def _begun(self) -> tuple[int, int, int]:
        if self._saving is None:
            raise CheckpointError(f"{self.path}: no save has begun, call begin() first")
        return self._saving


def by_need(steps: Sequence[int], pins: Mapping[Pin, int]) -> list[int]:
    """The indexes of the slots, in the order in which saves use them; the next save uses the first one.

    Empty slots come first, then slots without a pin, then those with the lowest ``Pin``, the oldest first. The newest
    step is the last one, so that it is never overwritten. With three slots or more, the step before it, which may be
    the newest step of a rank that lags, precedes it.

    Args:
        steps: The step of each slot; -1: it is empty.
        pins: The pinned steps; -1: none.
    """
    kept = sorted((step for step in steps if step != EMPTY), reverse=True)[: 1 if len(steps) < 3 else 2]
    strength = {step: why for why, step in sorted(pins.items()) if step != EMPTY}

    def need(index: int) -> tuple[bool, int, int]:
        step = steps[index]
        return step in kept, -1 if step in kept else strength.get(step, -1), step

    return sorted(range(len(steps)), key=need)
