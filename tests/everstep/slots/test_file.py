"""Slots of a checkpoint file: after any interruption or damage, a committed step is intact or known to be damaged."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.errors import CheckpointError, CorruptCheckpoint
from everstep.slots import format, reader
from everstep.slots.file import SlotFile
from everstep.slots.format import CUT_SHORT, NEVER_USED, PAGE, SLOT_BYTES, slot_at
from everstep.slots.reader import held
from tests.everstep.slots.saved import contents, save, valid_steps
from tests.shm import shm_folder

T = TypeVar("T")


def test_missing_file_holds_nothing(folder: Path) -> None:
    assert held(folder / "none") == []


def test_a_slot_that_a_living_rank_saves_into_while_it_is_read_is_no_damage(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = SlotFile(folder / "c", slots=2)
    save(file, 1, 10_000)
    save(file, 2, 10_000)
    judge, saves = format.inspect_slot, iter([3])

    def save_meanwhile(*arguments: Any) -> Any:
        for step in saves:
            save(file, step, 10_000)
        return judge(*arguments)

    monkeypatch.setattr(reader, "inspect_slot", save_meanwhile)

    assert {(slot.completed_steps, slot.valid) for slot in held(folder / "c")} == {(2, True), (3, True)}


def at_each_line(function: Callable[..., object], act: Callable[[], object], look: Callable[[], T]) -> list[T]:
    """Return the result of ``look`` before each line of a function. A kill could interrupt it at each line."""
    found: list[T] = []
    code = function.__code__

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code is not code:
            return None
        if event == "line":
            found.append(look())
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(before)
    return found


def test_a_kill_between_two_writes_of_a_header_leaves_the_slot_empty_or_whole(folder: Path) -> None:
    file = SlotFile(folder / "c", slots=2)
    save(file, 1, 10_000)
    save(file, 2, 10_000)
    file.generation = 7
    ctypes.memmove(file.begin(b"structure of 3", 9_000), contents(3, 9_000), 9_000)
    assert valid_steps(folder / "c") == [2], "a slot that is overwritten is invalid before its first byte changes"

    seen = at_each_line(SlotFile._store, lambda: file.commit(3), lambda: held(folder / "c"))

    assert len(seen) > 4
    assert {one.completed_steps for slots in seen for one in slots if one.valid} == {2, 3}
    assert {one.reason for slots in seen for one in slots if not one.valid} <= {CUT_SHORT, NEVER_USED}
    assert bytes(file.load(3).tensors) == contents(3, 9_000)


def test_a_loaded_state_is_the_saved_one(folder: Path) -> None:
    file = SlotFile(folder / "c", slots=3, generation=7)
    for step in range(1, 6):
        save(file, step, 10_000)
    again = SlotFile(folder / "c")
    assert again.slots == 3
    for step in (3, 4, 5):
        payload = again.load(step)
        assert (payload.completed_steps, payload.generation) == (step, 7)
        assert bytes(payload.tensors) == contents(step, 10_000)
        assert payload.structure == b"structure of %d" % step
    with pytest.raises(CheckpointError, match=r"does not have the state after step 2 .it has: 3, 4, 5"):
        again.load(2)


def test_growth_keeps_committed_slots(folder: Path) -> None:
    file = SlotFile(folder / "c", slots=2)
    save(file, 1, 100)
    save(file, 2, 100)
    before, kept = file.mapping, file.load(2)
    save(file, 3, 3_000_000)
    assert file.mapping == before + 1
    assert valid_steps(folder / "c") == [2, 3]
    assert bytes(kept.tensors) == bytes(file.load(2).tensors) == contents(2, 100)
    assert [path.name for path in folder.iterdir()] == ["c"]


def test_a_full_file_system_is_an_error_with_numbers(folder: Path) -> None:
    file = SlotFile(folder / "c")
    save(file, 4, 1000)
    with pytest.raises(CheckpointError, match=r"checkpoints in .*: c needs [\d.]+ GB more, and [\d.]+ GB are free"):
        file.begin(b"", 1 << 44)
    assert valid_steps(folder / "c") == [4]
    assert [path.name for path in folder.iterdir()] == ["c"]
    save(file, 5, 1000)
    assert valid_steps(folder / "c") == [4, 5]


def test_resuming_forgets_the_abandoned_future(folder: Path) -> None:
    file = SlotFile(folder / "c", slots=3)
    for step in (10, 11, 12):
        save(file, step, 100)
    file.discard_after(11)
    assert valid_steps(folder / "c") == [10, 11]
    save(file, 12, 100)
    assert valid_steps(folder / "c") == [10, 11, 12]


def test_close_gives_the_mapping_back(folder: Path) -> None:
    file = SlotFile(folder / "c")
    save(file, 1, 1 << 20)
    assert str(folder / "c") in Path("/proc/self/maps").read_text()
    file.close()
    assert str(folder / "c") not in Path("/proc/self/maps").read_text()
    assert valid_steps(folder / "c") == [1]


def test_a_foreign_file_is_replaced_by_a_save_and_named_by_a_load(folder: Path) -> None:
    (folder / "c").write_bytes(b"something else" * 1000)
    assert [slot.reason for slot in held(folder / "c")] == ["not a checkpoint file of version 3"]
    file = SlotFile(folder / "c")
    with pytest.raises(CorruptCheckpoint, match="not a checkpoint file"):
        file.load(1)
    save(file, 1, 10)
    assert valid_steps(folder / "c") == [1]


@settings(max_examples=60)
@given(
    slots=st.integers(2, 4),
    events=st.lists(
        st.tuples(st.sampled_from(["save", "die in copy", "die before commit", "reopen"]), st.integers(0, 20_000)),
        max_size=25,
    ),
)
def test_no_interleaving_loses_the_step_before(slots: int, events: list[tuple[str, int]]) -> None:
    """The newest ``slots`` - 1 committed steps survive any saves, even if a save is interrupted anywhere."""
    with shm_folder() as folder:
        path = folder / "c"
        file, committed, sizes = SlotFile(path, slots=slots), [], {}
        for step, (event, size) in enumerate(events):
            if event == "save":
                save(file, step, size)
                committed.append(step)
                sizes[step] = size
            elif event != "reopen":
                address = file.begin(b"never committed", size)
                ctypes.memset(address, 255, size // 2 if event == "die in copy" else size)
            if event != "save":
                file = SlotFile(path, slots=slots)
            # At most one slot is being written at any time.
            assert set(valid_steps(path)) >= set(committed[-(slots - 1) :])
            for kept in committed[-(slots - 1) :]:
                assert bytes(file.load(kept).tensors) == contents(kept, sizes[kept])


@settings(max_examples=60)
@given(st.data())
def test_a_flipped_bit_is_never_taken_for_a_state(data: st.DataObject) -> None:
    with shm_folder() as folder:
        path = folder / "c"
        file = SlotFile(path, slots=2)
        size = data.draw(st.integers(1, 3 * PAGE))
        save(file, 1, size)
        save(file, 2, size)
        used = -(-size // 64) * 64 + len(b"structure of 1")
        broken = data.draw(st.sampled_from([0, 1]))
        header, payload = slot_at(broken), file._regions[broken].at
        # The flipped bit is one that is used: in a header's fields, their checksum, the tensors or the structure.
        at = data.draw(st.integers(header, header + SLOT_BYTES - 1) | st.integers(payload, payload + used - 1))
        raw = bytearray(path.read_bytes())
        raw[at] ^= 1 << data.draw(st.integers(0, 7))
        path.write_bytes(raw)
        slots = held(path)
        assert not slots[broken].valid and slots[broken].reason
        assert slots[1 - broken].valid
        again = SlotFile(path)
        with pytest.raises(CorruptCheckpoint):
            again.load(broken + 1)
        assert bytes(again.load(2 - broken).tensors) == contents(2 - broken, size)


@settings(max_examples=60)
@given(length=st.integers(0, 40_000))
def test_a_truncated_file_gives_reasons_and_keeps_whole_slots(length: int) -> None:
    with shm_folder() as folder:
        path = folder / "c"
        file = SlotFile(path, slots=2)
        save(file, 1, 8000)
        save(file, 2, 8000)
        ends = [region.at + 8000 + 64 for region in file._regions]
        length = min(length * 5, path.stat().st_size - 1)
        os.truncate(path, length)
        slots = held(path)
        whole = {index + 1 for index, end in enumerate(ends) if end <= length}
        assert {slot.completed_steps for slot in slots if slot.valid} >= whole
        assert all(slot.valid or slot.reason for slot in slots)
        again = SlotFile(path)
        for slot in slots:
            if slot.valid:
                assert bytes(again.load(slot.completed_steps).tensors) == contents(slot.completed_steps, 8000)
        save(again, 3, 8000)  # the file can be written again, without a SIGBUS
        assert 3 in valid_steps(path)


SAVER = """
import ctypes, sys
from pathlib import Path
from everstep.slots.file import SlotFile
file = SlotFile(Path(sys.argv[1]), slots=2)
size = 8 << 20
for step in range(1, 10**9):
    address = file.begin(b"step %d" % step, size)
    for at in range(0, size, 1 << 16):
        ctypes.memset(address + at, step % 251, 1 << 16)
    file.commit(step)
    print(step, flush=True)
"""


@pytest.mark.parametrize("attempt", range(4))
def test_sigkill_in_the_middle_of_saves(folder: Path, attempt: int) -> None:
    """A process is killed while it saves. The newest step that it announced must be intact."""
    path = folder / "c"
    process = subprocess.Popen([sys.executable, "-c", SAVER, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for _ in range(3 + attempt):
        process.stdout.readline()
    time.sleep(0.003 * attempt)
    process.send_signal(signal.SIGKILL)
    rest = process.stdout.read().split("\n")
    process.stdout.close()
    process.wait()
    announced = max((int(line) for line in rest if line), default=3 + attempt)
    steps = set(valid_steps(path))
    assert steps & {announced, announced + 1}
    payload = SlotFile(path).load(max(steps))
    assert set(payload.tensors) == {max(steps) % 251}
    assert payload.structure == b"step %d" % max(steps)


def test_a_slot_is_verified_up_to_where_it_is_copied_and_to_its_end(folder: Path) -> None:
    file = SlotFile(folder / "c", slots=2)
    save(file, 1, 10_000)
    raw = (folder / "c").read_bytes()
    seen: list[int] = []

    def ends() -> Iterator[int]:
        for end in (3000, 2000, 7000, 7000, 9_999_999):
            seen.append(end)
            yield end

    file.verify(1, ends())
    assert seen == [3000, 2000, 7000, 7000, 9_999_999]
    for at in (0, 2999, 3000, 6999, 7000, 9999):
        damaged = bytearray(raw)
        damaged[file._regions[0].at + at] ^= 1
        (folder / "d").write_bytes(damaged)
        with pytest.raises(CorruptCheckpoint, match="do not match their checksum"):
            SlotFile(folder / "d").verify(1, iter((3000, 2000, 7000)))
