"""A slot says whose state it has, so the slot of another rank, job or run is never taken for the rank's own."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from everstep.errors import CorruptCheckpoint
from everstep.slots.checksum import PayloadChecksum
from everstep.slots.file import SlotFile
from everstep.slots.format import PAGE, SlotHeader, slot_at
from everstep.slots.owner import SlotOwner
from everstep.slots.reader import SlotReader, held
from tests.everstep.slots.saved import contents, save, valid_steps

OURS = SlotOwner("gpt", "run-2", 5)
OTHERS = [SlotOwner("gpt", "run-2", 4), SlotOwner("bert", "run-2", 5), SlotOwner("gpt", "run-1", 5)]


@pytest.mark.parametrize("other", OTHERS, ids=str)
def test_a_file_of_another_owner_is_refused_and_replaced_by_the_next_save(folder: Path, other: SlotOwner) -> None:
    path = folder / "checkpoint-5"
    save(SlotFile(path, owner=other), 7)
    says = f"it has the state of {other}, and not of {OURS}"
    with pytest.raises(CorruptCheckpoint, match=says):
        SlotReader(path, OURS)
    assert [slot.reason for slot in held(path, owner=OURS)] == [says]
    file = SlotFile(path, owner=OURS)
    with pytest.raises(CorruptCheckpoint, match=says):
        file.load(7)
    save(file, 8)
    assert [slot.completed_steps for slot in held(path, owner=OURS) if slot.valid] == [8]
    assert SlotReader(path).owner == OURS, "without an owner, a reader says whose file it is"


@pytest.mark.parametrize("other", OTHERS, ids=str)
def test_a_slot_of_another_owner_does_not_verify_in_our_file(folder: Path, other: SlotOwner) -> None:
    """A header and a payload that were copied from another owner's file, byte by byte."""
    for name, owner in (("theirs", other), ("ours", OURS)):
        save(SlotFile(folder / name, owner=owner), 7, 1000)
    theirs, ours = (folder / "theirs").read_bytes(), (folder / "ours").read_bytes()
    (folder / "ours").write_bytes(ours[: slot_at(0)] + theirs[slot_at(0) :])
    file = SlotFile(folder / "ours", owner=OURS)
    with pytest.raises(CorruptCheckpoint, match="its contents do not match their checksum"):
        file.load(7)
    assert not held(folder / "ours", owner=OURS)[0].valid
    reader = SlotReader(folder / "ours", OURS)
    assert not reader.intact(reader.headers()[0])


def test_without_an_owner_the_name_of_the_file_says_the_rank(folder: Path) -> None:
    save(SlotFile(folder / "checkpoint-4"), 7)
    shutil.copy(folder / "checkpoint-4", folder / "checkpoint-5")
    with pytest.raises(CorruptCheckpoint, match="it has the state of rank 4 of no job, and not of rank 5 of no job"):
        SlotFile(folder / "checkpoint-5").load(7)


@pytest.mark.parametrize("other", OTHERS, ids=str)
def test_a_received_copy_must_be_of_the_stated_owner_and_becomes_ours(folder: Path, other: SlotOwner) -> None:
    header, checksum, payload = _of(folder / "theirs", other)
    file = SlotFile(folder / "ours", owner=OURS)
    file.receive(header)[:] = payload
    with pytest.raises(CorruptCheckpoint, match=f"it is damaged, or it is not the state of {OURS}"):
        file.commit_received(header, checksum)
    file.receive(header)[:] = payload
    file.commit_received(header, checksum, origin=other)
    assert bytes(SlotFile(folder / "ours", owner=OURS).load(7).tensors) == contents(7, 3 * PAGE)
    assert valid_steps(folder / "ours") == [7]


def _of(path: Path, owner: SlotOwner) -> tuple[SlotHeader, PayloadChecksum, bytes]:
    save(SlotFile(path, owner=owner), 7, 3 * PAGE)
    reader = SlotReader(path, owner)
    (header,) = reader.headers()
    payload = bytearray(header.payload_bytes)
    reader.read_into(header, 0, memoryview(payload))
    checksum = PayloadChecksum()
    checksum.update(payload)
    return header, checksum, bytes(payload)
