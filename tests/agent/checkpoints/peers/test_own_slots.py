"""A rank without backups keeps its named steps in its own slots, during later saves and after restarts of the agent."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.checkpoints.options import Place
from agent.checkpoints.peers.own_slots import OwnSlots
from agent.checkpoints.saved_state import SavedStates
from agent.v1 import agent_pb2 as pb
from everstep.slots.file import SlotFile
from everstep.slots.owner import SlotOwner


class Rank:
    """A rank that saves steps, and the agent's ``OwnSlots``, which pins some of them."""

    def __init__(self, shm: Path) -> None:
        self.shm = shm
        self.file = SlotFile(shm / "checkpoint-0", slots=5, owner=SlotOwner("gpt", "", 0))
        self.start()

    def start(self) -> None:
        """Start or restart ``OwnSlots``, the agent's part."""
        self.saved = SavedStates()
        self.own_slots = OwnSlots(Place("gpt", "m0", self.shm, self.shm, self.saved), [0])

    def save(self, first: int, last: int) -> None:
        for step in range(first, last + 1):
            self.file.begin(b"tree", 64)
            header = self.file.commit(step)
            self.saved.held(0, self.held(), newest_slots=4)
            self.saved.own(0, step, header.saved_ns)
            self.own_slots.on_saved(0, header)

    def align(self, named: int, *, whole: int = 0, settled: int = 0) -> pb.SavedState:
        self.own_slots.align(0, pb.AlignBackupsRequest(named=named, whole=whole, settled=settled))
        return self.saved.of(0)

    def held(self) -> list[int]:
        return sorted(step for step in self.file._steps if step >= 0)


@pytest.fixture
def rank() -> Iterator[Rank]:
    shm = Path("/dev/shm") / f"everstep-keeper-{uuid.uuid4().hex[:8]}"
    shm.mkdir()
    made = Rank(shm)
    yield made
    made.file.close()
    (shm / "checkpoint-0").unlink()
    shm.rmdir()


def test_a_named_step_stays_until_the_next_one_is_complete(rank: Rank) -> None:
    rank.save(1, 5)
    assert rank.align(10).backup_named == 10
    rank.save(6, 30)
    assert 10 in rank.held()
    assert rank.saved.of(0).backup_step == 10
    assert rank.align(40, settled=9).backup_named == 10, "other ranks may still reach step 10"

    assert rank.align(40, whole=10, settled=10).backup_named == 40
    rank.save(31, 60)
    assert {10, 40} < set(rank.held())

    rank.align(0, settled=40)
    rank.save(61, 70)
    assert rank.held() == [66, 67, 68, 69, 70]


def test_a_restarted_agent_keeps_the_named_steps(rank: Rank) -> None:
    rank.save(1, 5)
    rank.align(10)
    rank.save(6, 12)
    rank.align(20, whole=10, settled=10)
    rank.save(13, 22)
    rank.start()
    rank.save(23, 40)

    state = rank.saved.of(0)
    assert {10, 20} < set(rank.held())
    assert (state.backup_named, state.backup_whole) == (20, 10)
    assert state.backup_none


def test_a_rank_that_passed_a_named_step_before_it_was_pinned_reports_it(rank: Rank) -> None:
    rank.save(1, 5)
    rank.own_slots.align(0, pb.AlignBackupsRequest(named=7))
    rank.file.forget(7)
    rank.saved.held(0, [5, 8], newest_slots=4)
    rank.file.begin(b"tree", 64)
    header = rank.file.commit(8)
    rank.own_slots.on_saved(0, header)

    assert rank.saved.of(0).backup_named < 7
