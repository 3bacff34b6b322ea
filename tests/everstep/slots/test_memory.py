"""Memory of a checkpoint file is allocated slot by slot. If the file system is full, no committed slot is lost."""

from __future__ import annotations

import ctypes
import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.local import mounts
from everstep.errors import CheckpointError
from everstep.slots.file import SlotFile
from everstep.slots.format import PAGE, slot_at
from everstep.slots.reader import SlotReader
from everstep.system.memory import free
from everstep.system.pages import READ, STRIDE, WRITE, populate
from tests.everstep.slots.saved import contents, save, valid_steps
from tests.shm import shm_folder

NO_ROOM = r"no room for checkpoints in .*: c needs [\d.]+ [MG]B more, and [\d.]+ [MG]B are free"


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MB in memory."""
    if said := mounts.why_not(tmp_path):
        pytest.skip(said)
    with mounts.small(tmp_path / "small", 2 << 20):
        yield tmp_path / "small"


def allocated(path: Path) -> int:
    return path.stat().st_blocks * 512


def test_memory_is_had_for_the_slot_that_is_used_and_for_the_others_when_there_is_time(folder: Path) -> None:
    """A save allocates only its own slot. ``prepare`` allocates the others, piece by piece."""
    path, size = folder / "c", 5_000_000
    file = SlotFile(path, slots=4)
    assert not file.prepare(), "there is nothing to prepare, since there is no file yet"
    save(file, 1, size)
    assert size < allocated(path) < 2 * size
    assert file.missing(size) > 3 * size
    turns = 1
    while file.prepare():
        turns += 1
    assert turns > 4 * size // STRIDE, "prepare allocates one small piece in each call"
    assert file.missing(size) == 0
    assert allocated(path) == path.stat().st_size
    again = SlotFile(path)
    assert again.missing(size) == 0
    assert bytes(again.load(1).tensors) == contents(1, size)


def test_a_part_of_a_slot_is_made_present_and_no_more(folder: Path) -> None:
    path = folder / "c"
    save(SlotFile(path, slots=2), 1, 5_000_000)
    header = SlotReader(path).headers()[0]
    file = SlotFile(folder / "d", slots=2)
    view = file.receive(header, allocate=False)
    assert allocated(folder / "d") == 3 * PAGE, "only the headers are allocated"
    file.make_present(1_000_000)
    assert 1_000_000 <= allocated(folder / "d") < 1_100_000
    view[:1_000_000] = bytes(1_000_000)
    file.make_present()
    assert allocated(folder / "d") >= 5_000_000


def test_a_save_allocates_the_named_parts_at_first_and_the_rest_later(folder: Path) -> None:
    path, size = folder / "c", 5_000_000
    file = SlotFile(path, slots=2)
    address = file.begin(b"structure", size, parts=[(0, 100), (3_000_000, 5000), (4_000_000, 0)])
    assert allocated(path) <= slot_at(2) + 5 * PAGE, "headers, structure and two parts"
    expected = contents(1, size)
    ctypes.memmove(address, expected[:100], 100)
    ctypes.memmove(address + 3_000_000, expected[3_000_000:3_005_000], 5000)
    file.make_present()
    assert allocated(path) >= size
    assert bytes(file.tensors()[:100]) == expected[:100]
    assert bytes(file.tensors()[3_000_000:3_005_000]) == expected[3_000_000:3_005_000]
    file.tensors()[:] = expected
    file.commit(1)
    assert bytes(SlotFile(path).load(1).tensors) == expected


def test_a_part_without_room_is_an_error_before_the_slot_is_changed(small: Path) -> None:
    path, size = small / "c", 500_000
    file = SlotFile(path, slots=2)
    save(file, 1, size)
    with (small / "other").open("wb") as taken:
        os.posix_fallocate(taken.fileno(), 0, free(small))
    with pytest.raises(CheckpointError, match=NO_ROOM):
        file.begin(b"structure", size, parts=[(0, 100)])
    assert valid_steps(path) == [1]


def test_a_slot_without_room_is_an_error_and_the_others_stay(small: Path) -> None:
    path, size = small / "c", 500_000
    file = SlotFile(path, slots=3)
    save(file, 1, size)
    other = small / "other"
    with other.open("wb") as taken:
        os.posix_fallocate(taken.fileno(), 0, 1_000_000)
    with pytest.raises(CheckpointError, match=NO_ROOM):
        file.begin(b"structure", size)
    while file.prepare():  # prepare takes the free memory, and does not wait for more
        pass
    assert file.missing(size)
    assert valid_steps(path) == [1]
    with pytest.raises(CheckpointError, match=NO_ROOM):
        SlotFile(path).begin(b"structure", size)
    other.unlink()
    for step in (2, 3, 4):
        save(file, step, size)
    assert valid_steps(path) == [2, 3, 4]


def test_a_file_for_whose_slots_there_is_no_room_is_not_begun(small: Path) -> None:
    path = small / "c"
    file = SlotFile(path, slots=3)
    save(file, 1, 100_000)
    with pytest.raises(CheckpointError, match=NO_ROOM):
        file.begin(b"", 900_000)  # one slot would fit, but not all three
    assert [one.name for one in small.iterdir()] == ["c"]
    assert valid_steps(path) == [1]
    save(file, 2, 100_000)
    assert valid_steps(path) == [1, 2]


@settings(max_examples=60)
@given(
    slots=st.integers(2, 4),
    events=st.lists(
        st.tuples(st.sampled_from(["save", "save", "prepare", "reopen", "full"]), st.integers(0, 400_000)), max_size=20
    ),
)
def test_committed_slots_survive_growth_want_of_room_and_reopening(slots: int, events: list[tuple[str, int]]) -> None:
    """Only the least needed slot is ever overwritten, or lost if there is no room for it to grow. A slot is allocated
    before its step counts."""
    full = False
    real = os.posix_fallocate

    def fallocate(descriptor: int, offset: int, length: int) -> None:
        if full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor, offset, length)

    with shm_folder() as folder:
        path, sizes = folder / "c", {}
        file = SlotFile(path, slots=slots)
        with mock.patch.object(os, "posix_fallocate", fallocate):
            for step, (event, size) in enumerate(events):
                full = event == "full"
                if event == "prepare":
                    file.prepare()
                elif event == "reopen":
                    file = SlotFile(path, slots=slots)
                else:
                    try:
                        save(file, step, size)
                        sizes[step] = size
                    except CheckpointError:
                        assert full
                    full = False
                there = valid_steps(path)
                assert set(sorted(sizes)[-slots + 1 :]) <= set(there) <= set(sorted(sizes)[-slots:])
                for one in there:
                    assert bytes(file.load(one).tensors) == contents(one, sizes[one])
        if sizes:
            assert allocated(path) >= sum(sizes[one] for one in there)


def test_pages_are_made_present_and_keep_what_they_hold(folder: Path) -> None:
    file = SlotFile(folder / "c", slots=2)
    save(file, 7, 300_000)
    region = file._regions[0]
    address, length = region.address, region.room
    for how in (READ, WRITE):
        assert populate(address + 100, length - 100, how)
    assert bytes(file.load(7).tensors) == contents(7, 300_000)
    file.close()
    assert not populate(address, length, WRITE), "the file is closed, so nothing is mapped at this address"


SAVES = """
import sys
from pathlib import Path
from everstep.slots.file import SlotFile
file = SlotFile(Path(sys.argv[1]), slots=2)
for step in range(1, 1_000_000):
    file.begin(b"", 0)
    file.commit(step)
    if step % 3 == 0:
        file.forget(step)
"""


def test_at_no_moment_does_a_slot_say_that_it_is_of_step_0(folder: Path) -> None:
    """If a process were killed at such a moment, the header would look damaged."""
    path = folder / "c"
    saving = subprocess.Popen([sys.executable, "-c", SAVES, str(path)])
    try:
        while not path.exists():
            assert saving.poll() is None
        descriptor = os.open(path, os.O_RDONLY)
        slots = [slot_at(0), slot_at(1)]
        seen = {os.pread(descriptor, 8, at) for _ in range(150_000) for at in slots}
        os.close(descriptor)
    finally:
        saving.kill()
        saving.wait()
    assert len(seen) > 5, "the process made several saves while the headers were read"
    assert bytes(8) not in seen
