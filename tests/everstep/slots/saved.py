"""Saves states with known contents into slot files, and lists the steps of a file."""

from __future__ import annotations

import contextlib
import ctypes
from pathlib import Path

from everstep.slots.file import SlotFile
from everstep.slots.format import PAGE, Pin, StoredSlot, file_header, slot_at
from everstep.slots.reader import SlotReader, held

_CYCLE = bytes(range(251))


def contents(step: int, size: int) -> bytes:
    """Return the tensor bytes of a step, which differ at every offset from those of neighbouring steps."""
    first = step * 31 % 251
    return ((_CYCLE[first:] + _CYCLE[:first]) * (size // 251 + 1))[:size]


def save(file: SlotFile, step: int, size: int = 100, structure: bytes = b"") -> None:
    """Save a state with the contents of a step."""
    address = file.begin(structure or b"structure of %d" % step, size)
    ctypes.memmove(address, contents(step, size), size)
    file.commit(step)


def valid_steps(path: Path) -> list[int]:
    """Return the steps of a file's intact slots, ascending."""
    return sorted(slot.completed_steps for slot in held(path) if slot.valid)


def payload_at(path: Path, step: int) -> int:
    """Return the offset in a file at which the payload of a step begins."""
    raw = path.read_bytes()
    slots = (StoredSlot.unpack(raw[slot_at(index) :]) for index in range(file_header(raw[:PAGE]).slots))
    return next(slot.at for slot in slots if slot.completed_steps == step)


def pins_in(path: Path) -> dict[Pin, int]:
    """Return the pinned steps of a file; -1: none."""
    with contextlib.closing(SlotReader(path)) as reader:
        return {why: reader.pinned(why) for why in Pin}
