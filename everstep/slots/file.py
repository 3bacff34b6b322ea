"""The checkpoint file of one rank: slots in shared memory that outlive the rank.

A file in ``/dev/shm`` holds N slots, each the state of the rank after some number of completed steps. A save goes into
the slot that is needed least; the slot's header is cleared first and committed last, so that a kill in the middle never
costs the step before. Two slots suffice while the copy blocks the step and every step has a collective that all ranks
enter: no rank can then be more than one step ahead of another. An overlapped copy needs three: a rank may have
committed a step while another one, past the same collective, has not.

The agent reads the same file while the rank trains (``SlotReader``) and *pins* the steps that it is sending, writing to
disk, or keeping: a save spares pinned slots as long as another one is left, and never waits for a pin. A received
backup is a file of the same format.

``everstep/slots/format.py`` has the layout, ``mapping.py`` the file itself.
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
    """A view of the mapped file: copy before keeping anything of it."""
    structure: bytes


class SlotFile(SlotMapping):
    """The writer's side of a checkpoint file. One process writes; saves do not nest.

    Args:
        path: The file; made at the first save when it does not exist.
        slots: Number of slots of a new file, 2 to 64. An existing file keeps its own number.
        generation: Generation of the job that this process belongs to.

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
        """Start a save: take the least needed slot, clear its header, store the structure.

        The file is made, or grown without losing a committed slot, when the state does not fit.

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
        """Take the least needed slot and clear its header; return its position in the file."""
        need = aligned(tensor_bytes) + structure_bytes
        if self._map is None or need > self.capacity:
            self._grow(need)
        index = self._least_needed()
        if allocate:
            self._extend(index, PAGE + self.capacity)  # raises while the slot is as it was
        at = self._slot_at(index)
        self._clear(index, SLOT.pack(EMPTY, self.generation, SAVING, tensor_bytes, structure_bytes, 0, 0))
        self._saving = (index, tensor_bytes, structure_bytes)
        return at

    def make_present(self, stop: int | None = None) -> None:
        """Allocate the slot of the save that has begun and map its pages, so that its writer waits for no page fault.

        Args:
            stop: Up to so many bytes of the payload; None: all of it.

        Raises:
            CheckpointError: the file system has no room; nothing is committed and nothing lost but the oldest slot.
        """
        index, tensor_bytes, structure_bytes = self._begun()
        need = aligned(tensor_bytes) + structure_bytes
        self._extend(index, PAGE + min(need, need if stop is None else stop), present=True)

    def tensors(self) -> memoryview:
        """The writable tensor bytes of the save that has begun, as a view of the mapping."""
        index, tensor_bytes, _ = self._begun()
        at = self._slot_at(index) + PAGE
        return memoryview(self._mapped())[at : at + tensor_bytes]

    def commit(self, completed_steps: int) -> SlotHeader:
        """End the save: checksum, then the header, its step count last.

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
        """Give a begun save up; its slot stays empty. Nothing happens when none has begun."""
        self._saving = None

    # Receiving a copy of another file's slot.

    def receive(self, header: SlotHeader, *, whole: bool = True) -> memoryview:
        """Start taking over a slot of another file; returns the writable payload, ``header.payload_bytes`` long.

        Args:
            header: The header of the other file's slot.
            whole: Allocate all of the slot now. Else ``make_present`` has to do it for each byte before it is written.

        Raises:
            CheckpointError: the file system has no room; the committed slots are untouched.
        """
        at = self._claim(header.tensor_bytes, header.structure_bytes, allocate=whole) + PAGE
        return memoryview(self._mapped())[at : at + header.payload_bytes]

    def commit_received(self, header: SlotHeader, checksum: int) -> None:
        """End what ``receive`` began, with the checksum of the bytes that arrived.

        Raises:
            CorruptCheckpoint: it is not the header's; the slot stays empty.
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
            if steps == completed_steps and other != index:  # saved anew: one slot a step
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
        mapped[at : at + I64.size] = header[: I64.size]  # one aligned store: from here on the slot counts
        self._steps[index] = completed_steps
        self._saving = None

    def discard_after(self, completed_steps: int) -> None:
        """Forget slots of later steps.

        A job that resumes from a step computes the later steps anew; slots of the abandoned
        steps must never be combined with new ones.
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
        """Mark a slot as empty. ``pack_into`` would show step 0 for a moment, and a kill then damages the header."""
        mapped, at = self._mapped(), self._slot_at(index)
        mapped[at : at + I64.size] = header[: I64.size]
        mapped[at + I64.size : at + SLOT.size] = header[I64.size :]
        self._steps[index] = EMPTY

    def _least_needed(self) -> int:
        """The slot for the next save: an empty slot, else the oldest unpinned, else the one whose pin gives way first.

        The newest committed step is never overwritten.
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
            verify: Compare its checksum. If it is not compared, the caller must call ``verify`` before the state is
            used.

        Raises:
            CheckpointError: no slot holds that step.
            CorruptCheckpoint: the slot's header, length or checksum does not hold.
        """
        if completed_steps < 0 or completed_steps not in self._steps:
            here = ", ".join(map(str, sorted(step for step in self._steps if step >= 0))) or "none"
            message = f"{self.path} does not hold the state after step {completed_steps} (it holds: {here})"
            if self._damage:
                raise CorruptCheckpoint(
                    f"{message}; it is damaged: {'; '.join(self._damage)}. Start from an older step"
                )
            raise CheckpointError(f"{message}. Start from a step that all ranks hold, or from the beginning")
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
            ends: The payload is hashed up to each of these offsets before the next one is taken, then to its end: so it
                is read while a copy has it in the cache.

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
        """Unmap the file, which stays; memory under views that are still held goes when they do."""
        self._saving = None
        super().close()

    def _begun(self) -> tuple[int, int, int]:
        if self._saving is None:
            raise CheckpointError(f"{self.path}: no save has begun, call begin() first")
        return self._saving
