"""Memory for a slot is made present while the slot's bytes arrive."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.checkpoints.peers.fetch import copy_slot, fetch_slot
from agent.checkpoints.peers.prefault import PIECE, Prefault
from controlplane.local import mounts
from everstep.errors import CheckpointError
from everstep.slots.file import SlotFile
from everstep.slots.reader import SlotReader, held
from tests.agent.checkpoints.peers.sides import OWNER, save, side


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder in shared memory."""
    path = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="everstep-test-"))
    yield path
    shutil.rmtree(path)


class Slow(SlotFile):
    """Makes memory present only when the test allows it."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, slots=2)
        self.turns = threading.Semaphore(0)
        self.reached = 0

    def make_present(self, stop: int | None = None) -> None:
        """Wait for the test's permission."""
        assert self.turns.acquire(timeout=30)
        super().make_present(stop)
        self.reached = stop or 0


def test_nothing_is_written_before_there_is_memory(folder: Path) -> None:
    save(folder / "from", 7, bytes(2 * PIECE))
    header = SlotReader(folder / "from").headers()[0]
    file = Slow(folder / "to")
    file.receive(header, allocate=False)
    with contextlib.closing(Prefault(file, header.payload_bytes)) as ahead:
        waiting = threading.Thread(target=ahead.reach, args=(PIECE + 1,))
        waiting.start()
        file.turns.release()
        ahead.reach(PIECE)
        waiting.join(0.05)
        assert waiting.is_alive() and file.reached == PIECE
        file.turns.release(2)
        waiting.join(30)
        ahead.reach(header.payload_bytes)
        assert file.reached == header.payload_bytes


def test_who_is_interrupted_leaves_the_rest_alone(folder: Path) -> None:
    save(folder / "from", 7, bytes(3 * PIECE))
    header = SlotReader(folder / "from").headers()[0]
    file = Slow(folder / "to")
    file.receive(header, allocate=False)
    ahead = Prefault(file, header.payload_bytes)
    closing = threading.Thread(target=ahead.close)
    closing.start()
    closing.join(0.05)
    file.turns.release()
    closing.join(30)
    assert not closing.is_alive() and file.reached == PIECE
    file.abort()


@pytest.mark.parametrize("way", ["fetch", "copy"])
def test_no_room_for_a_slot_on_its_way(tmp_path: Path, way: str) -> None:
    if said := mounts.why_not(tmp_path):
        pytest.skip(said)
    data = random.Random(5).randbytes(12_000_000)
    with side() as peer, mounts.small(tmp_path / "small", 26 << 20):
        save(peer.shm / "backup-0", 7, data)
        path = tmp_path / "small" / "checkpoint-0"

        def take(into: SlotFile) -> None:
            if way == "fetch":
                fetch_slot(peer.connect, 0, 7, "backup", into)
            else:
                copy_slot(peer.shm / "backup-0", 7, into)

        with contextlib.closing(SlotFile(path, slots=2, owner=OWNER(0))) as into:
            into.receive(SlotReader(peer.shm / "backup-0").headers()[0], allocate=False)
            into.abort()
            with (tmp_path / "small" / "other").open("wb") as other:
                os.posix_fallocate(other.fileno(), 0, 16 << 20)
            with pytest.raises(CheckpointError, match="no room for checkpoints"):
                take(into)
            assert not any(slot.valid for slot in held(path))
            (tmp_path / "small" / "other").unlink()
            take(into)
        assert [slot.completed_steps for slot in held(path) if slot.valid] == [7]
        with contextlib.closing(SlotFile(path, owner=OWNER(0))) as again:
            assert bytes(again.load(7).tensors) == data
