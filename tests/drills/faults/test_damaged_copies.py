"""Damage to copies of states: flipped bits and shortened files."""

from __future__ import annotations

from pathlib import Path

import pytest

from drills.faults import damaged_copies as damage
from drills.observe.stored_copies import steps_in
from everstep.errors import ClusterError
from everstep.slots.file import SlotFile
from everstep.slots.reader import held


def saved(path: Path, *steps: int) -> Path:
    file = SlotFile(path, slots=3)
    for step in steps:
        file.begin(b"structure", 5000)
        file.tensors()[:] = bytes([step]) * 5000
        file.commit(step)
    file.close()
    return path


def test_one_bit_of_one_step_is_seen_by_its_checksum_and_the_others_stay_whole(tmp_path: Path) -> None:
    path = saved(tmp_path / "checkpoint-3", 4, 5, 6)
    before = path.read_bytes()
    done = damage.flip_in_slot(path, 3, 5)
    after = path.read_bytes()
    [at] = [index for index, (old, new) in enumerate(zip(before, after, strict=True)) if old != new]
    assert after[at] ^ before[at] == 1
    assert done.what == f"bit 0 of byte {at} flipped"
    assert {one.completed_steps: one.valid for one in held(path)} == {4: True, 5: False, 6: True}
    assert steps_in(path) == {4, 5, 6}  # the header is still valid, so only a check of the contents finds the damage


def test_a_step_that_is_not_there_cannot_be_damaged(tmp_path: Path) -> None:
    path = saved(tmp_path / "backup-0", 4)
    with pytest.raises(ClusterError, match="no copy of step 9 of rank 0"):
        damage.flip_in_slot(path, 0, 9)
    path.write_bytes(b"no slots")
    with pytest.raises(ClusterError, match="no copy of step 4"):
        damage.flip_in_slot(path, 0, 4)
    assert steps_in(tmp_path / "missing") == set()


def test_files_are_flipped_and_cut(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.safetensors"
    path.write_bytes(bytes(100))
    damage.flip_in_file(path, 0, 20)
    assert path.read_bytes() == bytes(50) + b"\x01" + bytes(49)
    assert damage.truncate(path, 0, 20).what == "cut from 100 to 50 bytes"
    assert path.stat().st_size == 50
