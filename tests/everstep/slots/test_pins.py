"""The agent pins steps. The rank keeps pinned steps if it can, but never waits for a slot."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.slots.file import SlotFile
from everstep.slots.format import Pin
from everstep.slots.reader import SlotReader
from tests.everstep.slots.saved import save, valid_steps
from tests.shm import shm_folder


def test_a_pinned_step_is_kept_until_it_is_unpinned(folder: Path) -> None:
    file = SlotFile(folder / "c", slots=3)
    for step in (1, 2, 3):
        save(file, step)
    reader = SlotReader(folder / "c")
    assert reader.pin(Pin.BACKUP, 1)
    for step in (4, 5, 6):
        save(file, step)
    assert valid_steps(folder / "c") == [1, 5, 6]
    assert reader.header(1) is not None
    reader.unpin(Pin.BACKUP)
    save(file, 7)
    assert valid_steps(folder / "c") == [5, 6, 7]
    assert not reader.pin(Pin.BACKUP, 1)  # step 1 is gone, and the caller learns that
    reader.close()


def test_if_all_other_slots_are_pinned_the_weakest_pin_is_overwritten(folder: Path) -> None:
    file = SlotFile(folder / "c", slots=3)
    for step in (1, 2, 3):
        save(file, step)
    reader = SlotReader(folder / "c")
    reader.pin(Pin.DISK, 1)
    reader.pin(Pin.BACKUP, 2)
    save(file, 4)  # step 3, the newest, stays
    assert valid_steps(folder / "c") == [1, 3, 4]
    reader.pin(Pin.KEEP, 3)
    save(file, 5)
    assert valid_steps(folder / "c") == [1, 4, 5]
    reader.close()


def test_the_strongest_of_two_pins_on_a_step_counts(folder: Path) -> None:
    file = SlotFile(folder / "c", slots=3)
    for step in (1, 2, 3):
        save(file, step)
    reader = SlotReader(folder / "c")
    reader.pin(Pin.KEEP, 1)
    reader.pin(Pin.DISK, 1)
    reader.pin(Pin.BACKUP, 2)
    save(file, 4)
    assert valid_steps(folder / "c") == [1, 3, 4]
    reader.close()


def test_pins_outlive_growth_and_the_rank(folder: Path) -> None:
    file = SlotFile(folder / "c", slots=3)
    for step in (1, 2, 3):
        save(file, step)
    reader = SlotReader(folder / "c")
    reader.pin(Pin.BACKUP, 1)
    save(file, 4, 1_000_000)
    assert valid_steps(folder / "c") == [1, 3, 4]
    again = SlotFile(folder / "c")
    save(again, 5)
    save(again, 6)
    assert valid_steps(folder / "c") == [1, 5, 6]
    assert reader.header(1) is not None  # the reader has opened the new file
    reader.unpin(Pin.BACKUP)
    save(again, 7)
    assert valid_steps(folder / "c") == [5, 6, 7]
    reader.close()


@settings(max_examples=80)
@given(
    slots=st.integers(2, 5),
    events=st.lists(st.none() | st.tuples(st.sampled_from(list(Pin)), st.integers(0, 4)), max_size=40),
)
def test_saves_continue_and_the_newest_step_stays_with_any_pins(
    slots: int, events: list[tuple[Pin, int] | None]
) -> None:
    """The event None is a save. An event (pin, n) pins the step that is n before the newest; n = 0 removes the pin."""
    with shm_folder() as folder:
        file, step = SlotFile(folder / "c", slots=slots), 1
        pins: dict[Pin, int] = {}
        save(file, step)
        reader = SlotReader(folder / "c")
        for event in events:
            if event is None:
                before = set(valid_steps(folder / "c"))
                step += 1
                save(file, step)
                now = valid_steps(folder / "c")
                assert {step, step - 1} <= set(now)
                assert len(now) == min(step, slots)
                gone = before - set(now)
                # A pinned step was lost only if all others but the newest had pins that were as strong or stronger.
                strength = {held: max((why for why, of in pins.items() if of == held), default=-1) for held in before}
                for one in gone:
                    assert all(strength[one] <= strength[other] for other in before - {step - 1})
            else:
                why, back = event
                if back:
                    pins[why] = step - back
                    assert reader.pin(why, step - back) == (step - back in valid_steps(folder / "c"))
                else:
                    pins.pop(why, None)
                    reader.unpin(why)
        reader.close()
