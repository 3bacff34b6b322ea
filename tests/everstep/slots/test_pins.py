"""The agent pins steps. The rank keeps pinned steps if it can, but never waits for a slot."""

from __future__ import annotations

import contextlib
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.slots.file import SlotFile
from everstep.slots.format import Pin
from everstep.slots.reader import SlotReader
from tests.everstep.slots.saved import save, valid_steps
from tests.shm import shm_folder


def test_a_pinned_step_is_kept_until_it_is_unpinned(folder: Path) -> None:
    file = SlotFile(folder / "c", slots=4)
    for step in (1, 2, 3, 4):
        save(file, step)
    reader = SlotReader(folder / "c")
    assert reader.pin(Pin.BACKUP, 1)
    for step in (5, 6, 7):
        save(file, step)
    assert valid_steps(folder / "c") == [1, 5, 6, 7]
    assert reader.header(1) is not None
    reader.unpin(Pin.BACKUP)
    save(file, 8)
    assert valid_steps(folder / "c") == [5, 6, 7, 8]
    assert not reader.pin(Pin.BACKUP, 1)  # step 1 is gone, and the caller learns that
    reader.close()


def test_if_all_other_slots_are_pinned_the_weakest_pin_is_overwritten(folder: Path) -> None:
    file = SlotFile(folder / "c", slots=4)
    for step in (1, 2, 3, 4):
        save(file, step)
    reader = SlotReader(folder / "c")
    reader.pin(Pin.DISK, 1)
    reader.pin(Pin.BACKUP, 2)
    save(file, 5)  # steps 3 and 4, the newest, stay
    assert valid_steps(folder / "c") == [1, 3, 4, 5]
    reader.pin(Pin.KEEP, 3)
    save(file, 6)
    assert valid_steps(folder / "c") == [1, 4, 5, 6]
    save(file, 7)
    save(file, 8)
    assert valid_steps(folder / "c") == [1, 6, 7, 8]
    reader.close()


@settings(max_examples=100)
@given(slots=st.integers(2, 6), pins=st.lists(st.tuples(st.sampled_from(list(Pin)), st.integers(1, 8)), max_size=4))
def test_the_slots_for_the_newest_steps_keep_them_whatever_is_pinned(slots: int, pins: list[tuple[Pin, int]]) -> None:
    with shm_folder() as folder:
        file = SlotFile(folder / "c", slots=slots)
        for step in range(1, 9):
            save(file, step)
        with contextlib.closing(SlotReader(folder / "c")) as reader:
            assert reader.newest_slots() == slots
            for why, step in pins:
                reader.pin(why, step)
            newest = reader.newest_slots()
        assert min(slots, 3) <= newest <= slots
        for step in range(9, 20):
            file.begin(b"", 0)  # one slot is being written
            file.abort()
            there = valid_steps(folder / "c")
            assert there[len(there) - newest + 1 :] == list(range(step - newest + 1, step))
            save(file, step)


def test_the_strongest_of_two_pins_on_a_step_counts(folder: Path) -> None:
    file = SlotFile(folder / "c", slots=4)
    for step in (1, 2, 3, 4):
        save(file, step)
    reader = SlotReader(folder / "c")
    reader.pin(Pin.KEEP, 1)
    reader.pin(Pin.DISK, 1)
    reader.pin(Pin.BACKUP, 2)
    save(file, 5)
    assert valid_steps(folder / "c") == [1, 3, 4, 5]
    reader.close()


def test_pins_outlive_growth_and_the_rank(folder: Path) -> None:
    file = SlotFile(folder / "c", slots=4)
    for step in (1, 2, 3, 4):
        save(file, step)
    reader = SlotReader(folder / "c")
    reader.pin(Pin.BACKUP, 1)
    save(file, 5, 1_000_000)
    assert valid_steps(folder / "c") == [1, 3, 4, 5]
    again = SlotFile(folder / "c")
    save(again, 6)
    save(again, 7)
    assert valid_steps(folder / "c") == [1, 5, 6, 7]
    reader.unpin(Pin.BACKUP)
    save(again, 8)
    assert valid_steps(folder / "c") == [5, 6, 7, 8]
    reader.close()


@settings(max_examples=80)
@given(
    slots=st.integers(2, 7),
    events=st.lists(st.none() | st.tuples(st.sampled_from(list(Pin)), st.integers(0, 6)), max_size=40),
)
def test_each_slot_beyond_three_keeps_a_pinned_step(slots: int, events: list[tuple[Pin, int] | None]) -> None:
    """The event None is a save. An event (pin, n) pins the step that is n before the newest; n = 0 removes the pin.

    A save keeps the two newest steps (with two slots: the newest one), and the ``slots`` - 3 steps with the highest
    pins among the others. If a step is pinned for several reasons, the highest pin counts.
    """
    with shm_folder() as folder:
        file, step = SlotFile(folder / "c", slots=slots), 1
        pins: dict[Pin, int] = {}
        save(file, step)
        reader = SlotReader(folder / "c")
        for event in events:
            if event is None:
                before = set(valid_steps(folder / "c"))
                newest = set(sorted(before)[-1 if slots == 2 else -2 :])
                strength = {why: held for why, held in sorted(pins.items()) if held in before - newest}
                by_step = {held: why for why, held in strength.items()}
                strongest = sorted(by_step, key=lambda held: by_step[held], reverse=True)[: max(slots - 3, 0)]
                step += 1
                save(file, step)
                now = set(valid_steps(folder / "c"))
                assert now >= {step, *newest, *strongest}
                assert len(now) == min(step, slots)
            else:
                why, back = event
                if back:
                    pins[why] = step - back
                    assert reader.pin(why, step - back) == (step - back in valid_steps(folder / "c"))
                else:
                    pins.pop(why, None)
                    reader.unpin(why)
        reader.close()


class Ranks:
    """Ranks that save while the agent pins steps. Every step has a collective of all ranks.

    Args:
        overlap: Whether a copy may end after its step's collective, as with three slots or more.
    """

    def __init__(self, folder: Path, count: int, slots: int, *, overlap: bool) -> None:
        self.paths = [folder / f"checkpoint-{rank}" for rank in range(count)]
        self.files = [SlotFile(path, slots=slots) for path in self.paths]
        self.begun, self.committed = [0] * count, [0] * count
        self.overlap = overlap

    def act(self, rank: int) -> None:
        """A rank commits its save, or else begins the next one; or it waits for the others in the collective."""
        file, step = self.files[rank], self.begun[rank]
        if self.committed[rank] < step:
            file.commit(step)
            self.committed[rank] = step
        elif min(self.begun if self.overlap else self.committed) >= step:
            file.begin(b"", 100)
            self.begun[rank] = step + 1

    def pin(self, rank: int, why: Pin, back: int) -> None:
        """Pin a step of a rank."""
        if self.begun[rank]:
            with contextlib.closing(SlotReader(self.paths[rank])) as reader:
                reader.pin(why, max(self.begun[rank] - back, 0))

    def common(self) -> int:
        """The newest step that every rank has, if all of them are killed now; 0: there is none."""
        return max(set.intersection(*(set(valid_steps(path)) for path in self.paths)), default=0)


@settings(max_examples=100)
@given(
    count=st.integers(2, 3),
    slots=st.integers(2, 5),
    events=st.lists(
        st.tuples(st.integers(0, 2), st.none() | st.tuples(st.sampled_from(list(Pin)), st.integers(0, 5))), max_size=80
    ),
)
def test_the_newest_step_that_all_ranks_committed_is_there_whenever_they_are_killed(
    count: int, slots: int, events: list[tuple[int, tuple[Pin, int] | None]]
) -> None:
    with shm_folder() as folder:
        ranks = Ranks(folder, count, slots, overlap=slots > 2)
        for number, pin in events:
            rank = number % count
            if pin is None:
                ranks.act(rank)
            else:
                ranks.pin(rank, *pin)
            assert ranks.common() == min(ranks.committed)


def test_the_rank_that_lags_decides_although_a_backup_and_the_last_one_are_pinned(folder: Path) -> None:
    """Backups take longer than a step: step 100 is at the peer and step 101 is sent. Rank 1 is a step ahead."""
    ranks = Ranks(folder, 2, 4, overlap=True)
    for step in range(1, 120):
        for rank in (0, 1, 0, 1):
            ranks.act(rank)
        if step == 101:
            for rank in (0, 1):
                ranks.pin(rank, Pin.KEEP, 1)
                ranks.pin(rank, Pin.BACKUP, 0)
    for rank in (0, 1, 1, 1):
        ranks.act(rank)
    assert (ranks.begun, ranks.committed) == ([120, 121], [119, 120])
    assert ranks.common() == 119
    assert [min(valid_steps(path)) for path in ranks.paths] == [101, 101], "the step that is sent is kept too"
