"""A state that becomes larger: the file grows slot by slot, and needs no memory beyond that of its slots."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import pytest

from controlplane.local import mounts
from everstep.errors import CheckpointError
from everstep.slots import file, mapping
from everstep.slots.file import SlotFile
from everstep.slots.footprint import footprint, refusal
from everstep.slots.format import Pin, capacity_for, slot_at
from everstep.slots.reader import SlotReader
from everstep.system.memory import free
from tests.everstep.slots.saved import contents, save, valid_steps

SMALL, LARGE = 200_000, 600_000
TRACED = {mapping.__file__, file.__file__}


def allocated(path: Path) -> int:
    return path.stat().st_blocks * 512


@pytest.fixture
def narrow(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for four large slots, but not for a small slot beside them."""
    if said := mounts.why_not(tmp_path):
        pytest.skip(said)
    with mounts.small(tmp_path / "narrow", footprint(LARGE, 1, 4, 0).total + capacity_for(SMALL) // 2):
        yield tmp_path / "narrow"


def test_what_the_room_check_calls_enough_is_enough_to_grow(narrow: Path) -> None:
    path = narrow / "checkpoint-0"
    slots = SlotFile(path, slots=4)
    for step in range(1, 6):
        save(slots, step, SMALL)
    while slots.prepare():
        pass
    room = free(narrow) + allocated(path)
    assert not refusal(footprint(LARGE, 1, 4, 0), room, room, "m0")
    assert free(narrow) < slots.missing(LARGE) + allocated(path), "a second file would not fit"
    for step in range(6, 16):
        before = valid_steps(path)
        save(slots, step, LARGE)
        assert valid_steps(path) == [*before[1:], step], "only the slot of the save changes"
    assert [one.name for one in narrow.iterdir()] == ["checkpoint-0"]
    for step in valid_steps(path):
        assert bytes(slots.load(step).tensors) == contents(step, LARGE)


def test_if_a_larger_state_does_not_fit_in_all_slots_nothing_changes(narrow: Path) -> None:
    path = narrow / "checkpoint-0"
    slots = SlotFile(path, slots=4)
    for step in range(1, 6):
        save(slots, step, SMALL)
    with pytest.raises(CheckpointError, match="no room for checkpoints"):
        slots.begin(b"", LARGE * 2)
    assert valid_steps(path) == [2, 3, 4, 5]


def test_a_state_that_alternates_between_sizes_needs_no_more_than_its_largest(folder: Path) -> None:
    slots = SlotFile(folder / "c", slots=3)
    for step in range(1, 30):
        save(slots, step, 100_000 * (1 + step * 7 % 11))
    limit = slot_at(3) + 3 * capacity_for(1_100_000)
    assert allocated(folder / "c") <= limit
    assert (folder / "c").stat().st_size <= 2 * limit
    again = SlotFile(folder / "c")
    for step in (27, 28, 29):
        assert bytes(again.load(step).tensors) == contents(step, 100_000 * (1 + step * 7 % 11))


def test_what_a_thread_prepares_while_its_slot_grows_gets_no_memory(folder: Path) -> None:
    slots = SlotFile(folder / "c")
    for step in (1, 2, 3):
        save(slots, step, SMALL)
    regions = slots.regions()
    slots.begin(b"", LARGE, parts=())
    with mock.patch.object(slots, "regions", return_value=regions):
        regions[0].present = 0
        assert slots.prepare()
    assert allocated(folder / "c") < slot_at(3) + 3 * capacity_for(SMALL)


def killed_after(lines: int, path: Path) -> bool:
    """Let a process save step 5, with growth, and kill it before a line of the slots' code; False: it came to its
    end."""
    child = os.fork()
    if child == 0:
        left = lines

        def trace(frame: FrameType, event: str, _: object) -> Any:
            nonlocal left
            if frame.f_code.co_filename not in TRACED:
                return None
            if event == "line":
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
            return trace

        try:
            slots = SlotFile(path)
            sys.settrace(trace)
            save(slots, 5, LARGE)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


@pytest.mark.timeout(600)  # about a hundred processes
def test_a_kill_at_any_line_of_a_save_that_grows_costs_only_the_least_needed_step(folder: Path) -> None:
    path, steps = folder / "checkpoint-0", set()
    slots = SlotFile(folder / "begin", slots=4, owner=SlotFile(path).owner)
    for step in range(1, 5):
        save(slots, step, SMALL)
    with_pins = SlotReader(folder / "begin")
    with_pins.pin(Pin.DISK, 1)
    with_pins.close()
    most = slot_at(4) + 3 * capacity_for(SMALL) + capacity_for(LARGE)
    for lines in range(10_000):
        shutil.copy(folder / "begin", path)
        was_killed = killed_after(lines, path)
        found = valid_steps(path)
        steps.add(tuple(found))
        again = SlotFile(path)
        assert valid_steps(path) == found, "to open the file changes no slot"
        assert set(found) >= {1, 3, 4}, "the two newest steps and the pinned one are kept"
        for step in found:
            assert bytes(again.load(step).tensors) == contents(step, LARGE if step == 5 else SMALL)
        assert allocated(path) <= most, "memory that belongs to no slot is free again"
        save(again, 6, LARGE)
        save(again, 7, LARGE)
        assert valid_steps(path)[-2:] == [6, 7]
        again.close()
        if not was_killed:
            break
    assert lines > 50
    assert steps == {(1, 2, 3, 4), (1, 3, 4), (1, 3, 4, 5)}
