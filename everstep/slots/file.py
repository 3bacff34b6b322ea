"""Writes the checkpoint file of one rank: slots in shared memory that outlive the rank.

A file in ``/dev/shm`` has N slots, each for the state of the rank after a number of completed steps. A save uses the
least needed slot. It clears the slot's header first and writes the header last, so that a kill during a save never
costs an older step. Two slots suffice if training waits for each copy and every step has a collective of all ranks,
since then no rank is more than one step ahead of another. An overlapped copy needs three slots: after the same
collective, one rank may have committed a step that another rank has not committed yet.

The agent reads the same file while the rank trains (``SlotReader``). It *pins* the steps that it sends, writes to disk
or keeps. A save overwrites a pinned slot only if no other slot is left, and never waits for a pin. A received backup is
a file of the same format.

``everstep/slots/format.py`` has the layout, and ``mapping.py`` maps the file.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import xxhash

from everstep.errors import CheckpointError, CorruptCheckpoint
from everstep.slots.format import (
    EMPTY,
    I64,
    MAX_SLOTS,
    PAGE,
    SAVED,
    SAVING,
    SLOT,
    U64,
    UNUSED,
    Pin,
    SlotHeader,
    aligned,
    inspect_slot,
    pins_of,
)
from everstep.slots.mapping import SlotMapping


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
        generation: Generation of the job to which this process belongs.

    Raises:
        CheckpointError: too few or too many slots, or the file cannot be opened.
    """

    def __init__(self, path: Path, *, slots: int = 3, generation: int = 0) -> None:
        if not 2 <= slots <= MAX_SLOTS:
            raise CheckpointError(f"{slots} checkpoint slots: use 2 to {MAX_SLOTS}; with one, a kill loses everything")
        super().__init__(path, slots)
        self.generation = generation
        self._saving: tuple[int, int, int] | None = None

    # Saving.

    def begin(self, structure: bytes, tensor_bytes: int) -> int:
        """Start a save: clear the header of the least needed slot, and store the structure in it.

        If the state does not fit, the file is made or grown; committed slots are kept.

        Returns:
            Address of ``tensor_bytes`` writable bytes, valid until ``commit``.

        Raises:
            CheckpointError: the file system has no room; the committed slots are untouched.
        """
        at = self._claim(tensor_bytes, len(structure), allocate=True)
        start = at + PAGE + aligned(tensor_bytes)
        self._mapped()[start : start + len(structure)] = structure
        return self._base + at + PAGE

    def _claim(self, tensor_bytes: int, structure_bytes: int, *, allocate: bool) -> int:
        """Clear the header of the least needed slot; returns the slot's position in the file."""
        need = aligned(tensor_bytes) + structure_bytes
        if self._map is None or need > self.capacity:
            with self._memory:
                self._grow(need)
        index = self._least_needed()
        if allocate:
            self._extend(index, PAGE + self.capacity)  # before the slot is changed, since it may raise an error
        at = self._slot_at(index)
        self._clear(index, SLOT.pack(EMPTY, self.generation, SAVING, tensor_bytes, structure_bytes, 0, 0))
        self._saving = (index, tensor_bytes, structure_bytes)
        return at

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
        self._extend(index, PAGE + min(need, need if stop is None else stop), present=True)

    def tensors(self) -> memoryview:
        """The writable tensor bytes of the current save, as a view of the mapping."""
        index, tensor_bytes, _ = self._begun()
        at = self._slot_at(index) + PAGE
        return memoryview(self._mapped())[at : at + tensor_bytes]

    def commit(self, completed_steps: int) -> SlotHeader:
        """End the save: compute the checksum and write the header. The number of completed steps is written last.

        Raises:
            CheckpointError: no save has begun, or the count is negative.
        """
        index, tensor_bytes, structure_bytes = self._begun()
        if completed_steps < 0:
            raise CheckpointError(f"cannot save a state after {completed_steps} steps: the count starts at 0")
        at = self._slot_at(index)
        with memoryview(self._mapped()) as view:
            payload = view[at + PAGE : at + PAGE + aligned(tensor_bytes) + structure_bytes]
            digest = xxhash.xxh3_64(seed=completed_steps)
            digest.update(payload)  # releases the GIL
            checksum = digest.intdigest()
        header = SlotHeader(completed_steps, self.generation, tensor_bytes, structure_bytes, checksum, time.time_ns())
        self._write_header(index, header)
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
        at = self._claim(header.tensor_bytes, header.structure_bytes, allocate=allocate) + PAGE
        return memoryview(self._mapped())[at : at + header.payload_bytes]

    def commit_received(self, header: SlotHeader, checksum: int) -> None:
        """Commit the slot that ``receive`` began.

        Args:
            header: The header of the other file's slot.
            checksum: Checksum of the received payload.

        Raises:
            CorruptCheckpoint: the checksum differs from the header's; the slot stays empty.
        """
        index, _, _ = self._begun()
        if checksum != header.checksum:
            self._saving = None
            raise CorruptCheckpoint(
                f"the copy of the state after step {header.completed_steps} does not match its checksum"
            )
        self._write_header(index, header)

    def _write_header(self, index: int, fields: SlotHeader) -> None:
        completed_steps = fields.completed_steps
        for other, steps in enumerate(self._steps):
            if steps == completed_steps and other != index:  # each step has at most one slot
                self._forget(other)
        mapped, at = self._mapped(), self._slot_at(index)
        header = SLOT.pack(
            completed_steps,
            fields.generation,
            SAVED,
            fields.tensor_bytes,
            fields.structure_bytes,
            fields.checksum,
            fields.saved_ns,
        )
        mapped[at + 8 : at + SLOT.size] = header[8:]
        U64.pack_into(mapped, at + SLOT.size, xxhash.xxh3_64_intdigest(header))
        mapped[at : at + I64.size] = header[: I64.size]  # one aligned store, after which the slot counts
        self._steps[index] = completed_steps
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
        self._clear(index, SLOT.pack(EMPTY, 0, UNUSED, 0, 0, 0, 0))

    def _clear(self, index: int, header: bytes) -> None:
        """Mark a slot as empty; ``header`` has a step of -1."""
        # ``pack_into`` would show step 0 for a moment; after a kill at that moment the header would be damaged.
        mapped, at = self._mapped(), self._slot_at(index)
        mapped[at : at + I64.size] = header[: I64.size]
        mapped[at + I64.size : at + SLOT.size] = header[I64.size :]
        self._steps[index] = EMPTY

    def _least_needed(self) -> int:
        """The slot for the next save.

        It is an empty slot, otherwise the oldest slot without a pin, otherwise the slot with the lowest ``Pin``. The
        newest committed step is never overwritten.
        """
        pins = {step: pin for pin, step in zip(Pin, pins_of(self._mapped()), strict=True) if step != EMPTY}
        newest = max(self._steps)
        free = [index for index, steps in enumerate(self._steps) if steps != newest or steps == EMPTY]
        return min(free, key=lambda index: (pins.get(self._steps[index], -1), self._steps[index]))

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
        self._inspect(completed_steps, contents=verify)
        mapped, at = self._mapped(), self._slot_at(self._steps.index(completed_steps))
        view = memoryview(mapped)[at + PAGE : at + PAGE + self.capacity]
        _, generation, _, tensor_bytes, structure_bytes, _, _ = SLOT.unpack_from(mapped, at)
        start = aligned(tensor_bytes)
        structure = bytes(view[start : start + structure_bytes])
        return Payload(completed_steps, generation, view[:tensor_bytes], structure)

    def verify(self, completed_steps: int, ends: Iterable[int] = ()) -> None:
        """Compare the checksum of a state that was loaded; other threads run meanwhile.

        Args:
            completed_steps: Completed steps of the state.
            ends: Offsets in the payload. The next offset is requested only when the payload up to the previous offset
                is hashed. So another thread can copy bytes while they are hashed, as long as they are in the cache.

        Raises:
            CorruptCheckpoint: the checksum differs.
        """
        self._inspect(completed_steps, contents=True, ends=ends)

    def _inspect(self, completed_steps: int, *, contents: bool, ends: Iterable[int] = ()) -> None:
        mapped, at = self._mapped(), self._slot_at(self._steps.index(completed_steps))
        view = memoryview(mapped)[at + PAGE : at + PAGE + self.capacity]

        def chunks(count: int) -> Iterator[memoryview]:
            done = 0
            for end in ends:
                if done < end <= count:
                    yield view[done:end]
                    done = end
            yield view[done:count]

        info = inspect_slot(mapped[at : at + PAGE], self.capacity, chunks if contents else None)
        if not info.valid:
            raise CorruptCheckpoint(
                f"{self.path}: the state after step {completed_steps} is damaged: {info.reason}. "
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
