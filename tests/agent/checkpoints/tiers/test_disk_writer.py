"""The disk tier of one machine: the steps that it writes, keeps, reports and restores."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agent.checkpoints.tiers.background import Gate
from everstep.slots.format import Pin
from everstep.slots.reader import SlotReader
from tests.agent.checkpoints.tiers.tier_job import DISK, JOB, RUNS, Machine, wait_for
from tests.everstep.slots.saved import pins_in


@pytest.fixture
def machine_of(tmp_path: Path) -> Iterator[Callable[..., Machine]]:
    made: list[Machine] = []

    def make(**options: Any) -> Machine:
        made.append(Machine(tmp_path, **options))
        return made[-1]

    yield make
    for machine in made:
        machine.close()


def pinned(machine: Machine, rank: int) -> int:
    return pins_in(machine.ranks[rank].path)[Pin.DISK]


def test_due_steps_are_written_and_the_newest_steps_are_kept(machine_of: Callable[..., Machine]) -> None:
    machine = machine_of()
    machine.launch()
    for step in range(1, 46):
        machine.save(step)
        if step % 10 == 0:
            machine.on_disk(step)
    wait_for(lambda: machine.steps() == {0: [30, 40], 1: [30, 40]}, "old steps are deleted")
    assert all(pinned(machine, rank) == -1 for rank in (0, 1))
    assert machine.problem() == ""
    for one in machine.held(verify=True):
        assert (one.valid, one.reason, one.generation) == (True, "", 1)
        assert Path(one.place).is_file()
        assert one.saved_ns > 0


def test_a_step_on_disk_is_restored_bit_for_bit(machine_of: Callable[..., Machine]) -> None:
    machine = machine_of()
    machine.launch()
    machine.save(9, 10)
    machine.on_disk(10)
    machine.lose_memory()
    for rank in (0, 1):
        assert machine.restore(rank, 10) > machine.size
        assert machine.holds(rank, 10)


def test_a_step_is_written_when_the_last_rank_reaches_it(machine_of: Callable[..., Machine]) -> None:
    machine = machine_of()
    machine.launch()
    machine.save(9, 10, 11, ranks=(0,))
    wait_for(lambda: machine.saved.of(0).disk_step == 10, "rank 0 is on disk, without waiting for rank 1")
    machine.save(9, ranks=(1,))
    assert machine.saved.of(1).disk_step == -1
    machine.save(10, ranks=(1,))
    machine.on_disk(10)


def test_a_slot_stays_pinned_while_it_is_written_to_disk(machine_of: Callable[..., Machine]) -> None:
    machine = machine_of()
    machine.launch()
    machine.save(10, ranks=(0,))
    wait_for(lambda: machine.saved.of(0).disk_step == 10, "rank 0 is on disk")
    machine.save(10, ranks=(1,))
    machine.on_disk(10)
    machine.save(*range(11, 20))
    machine.persist(20)
    assert machine.saved.of(0).disk_wanted == 20
    machine.save(20, 21, 22, 23, ranks=(0,))
    machine.on_disk(10)
    machine.save(20, ranks=(1,))
    machine.on_disk(20)
    assert machine.saved.of(0).disk_wanted == -1
    assert machine.steps() == {0: [10, 20], 1: [10, 20]}


def test_a_requested_step_is_written_or_reported_as_gone(machine_of: Callable[..., Machine]) -> None:
    machine = machine_of(disk_every_steps=0)
    machine.launch()
    machine.save(1, 2, 3)
    machine.persist(3)
    machine.on_disk(3)
    machine.persist(6)
    machine.save(4, 5, 6, 7)
    machine.on_disk(6)
    machine.save(8, 9, 10, 11)
    machine.persist(7)
    assert machine.problem() == "step 7 was requested, and rank 0, now at step 11, does not have it any more"
    assert machine.saved.of(0).disk_wanted == -1
    assert machine.steps() == {0: [3, 6], 1: [3, 6]}


def test_if_a_rank_lost_the_due_step_only_this_step_is_missing(machine_of: Callable[..., Machine]) -> None:
    machine = machine_of()
    machine.launch()
    machine.save(10, ranks=(0,))
    wait_for(lambda: machine.saved.of(0).disk_step == 10, "rank 0 is on disk")
    for step in range(9, 15):  # the save signal of rank 1 was lost
        machine.ranks[1].save(step)
    machine.save(15, ranks=(1,))
    wait_for(lambda: "step 10 is not on disk: rank 1 overwrote it" in machine.problem(), "the missing step is reported")
    machine.save(20)
    machine.on_disk(20)
    wait_for(lambda: machine.problem() == "", "the problem is over")
    wait_for(
        lambda: machine.steps() == {0: [10, 20], 1: [20]}, "step 10 of rank 0 stays, although rank 1 has no step 10"
    )


def test_nothing_is_written_after_stop(machine_of: Callable[..., Machine]) -> None:
    machine = machine_of(size=80_000_000)
    machine.launch()
    machine.save(10)
    folder = machine.place.state_dir / "checkpoints" / JOB / "step-000000010"
    wait_for(lambda: any(folder.glob("*.writing")), "step 10 is being written")
    machine.tiers.shut()
    seen = sorted(path.name for path in folder.iterdir() if path.suffix == ".json")
    assert all(pinned(machine, rank) == -1 for rank in (0, 1))
    machine.save(20)
    wait_for(lambda: not any(folder.glob("*.writing")), "the partial files are removed")
    assert sorted(path.name for path in folder.iterdir() if path.suffix == ".json") == seen
    assert 20 not in machine.steps().get(0, [])


def test_a_launch_renames_later_steps_and_keeps_them(machine_of: Callable[..., Machine]) -> None:
    machine = machine_of(disk_keep=3)
    machine.launch()
    for step in (10, 20, 30):
        machine.save(step)
        machine.on_disk(step)
    machine.tiers.shut()
    machine.launch(generation=2, resume_step=10)
    assert machine.steps() == {0: [10], 1: [10]}
    assert machine.saved.of(0).disk_step == 10
    folder = machine.place.state_dir / "checkpoints" / JOB
    assert sorted(path.name for path in folder.glob("abandoned*")) == [
        "abandoned-g2-step-000000020",
        "abandoned-g2-step-000000030",
    ]
    machine.save(20)
    machine.on_disk(20)
    assert [(one.completed_steps, one.generation) for one in machine.held() if one.rank == 0] == [(10, 1), (20, 2)]


def test_a_repeated_launch_renames_nothing(machine_of: Callable[..., Machine]) -> None:
    machine = machine_of()
    machine.launch()
    machine.save(10)
    machine.on_disk(10)
    machine.tiers.open(machine.launch_options())
    assert machine.steps() == {0: [10], 1: [10]}


def test_steps_of_an_earlier_run_of_the_name_are_not_used(machine_of: Callable[..., Machine]) -> None:
    machine = machine_of()
    machine.launch()
    machine.save(10)
    machine.on_disk(10)
    machine.tiers.close()
    jobs = machine.place.state_dir / "jobs" / JOB
    jobs.rename(jobs.with_name("gpt.previous"))  # as the agent does for a new job of this name
    machine.tiers = machine.made()
    assert machine.steps() == {0: [10], 1: [10]}, "the files are kept, so that a job can start from them"
    machine.turn_to(RUNS[1])
    machine.launch(generation=1, resume_step=0)
    assert machine.steps() == {}
    assert len(list((machine.place.state_dir / "checkpoints" / JOB).glob("abandoned-g1-*"))) == 1


def test_a_restarted_agent_continues(machine_of: Callable[..., Machine]) -> None:
    machine = machine_of(disk_path="", disk_keep=1)
    machine.launch()
    machine.save(10)
    machine.on_disk(10)
    machine.tiers.close()
    machine.ranks[0].save(11)
    machine.tiers = machine.made()
    machine.saved.clear()
    assert machine.steps() == {0: [10], 1: [10]}
    machine.tiers.open(machine.launch_options())
    assert machine.saved.of(1).disk_step == 10
    folder = machine.place.state_dir / "checkpoints" / JOB / "step-000000010"
    written = (folder / "rank-0.json").stat().st_mtime_ns
    machine.tiers.on_saved(0, machine.ranks[0].save(12))
    machine.save(13)
    assert (folder / "rank-0.json").stat().st_mtime_ns == written, "a file on disk is not written again"
    machine.save(20)
    machine.on_disk(20)
    wait_for(lambda: machine.steps() == {0: [20], 1: [20]}, "only the newest step is kept")


def test_the_time_without_an_agent_is_not_taken_for_that_of_a_slow_disk(machine_of: Callable[..., Machine]) -> None:
    """The agent was killed while it wrote step 10. Training continued, and did not overwrite the pinned slots."""
    machine = machine_of()
    machine.launch()
    machine.tiers.close()
    readers = []
    for rank in machine.ranks.values():
        rank.save(10)
        readers.append(SlotReader(rank.path))
        assert readers[-1].pin(Pin.DISK, 10)
        for step in range(11, 26):
            rank.save(step)

    machine.tiers = machine.made()
    machine.saved.clear()
    machine.tiers.open(machine.launch_options())
    machine.on_disk(10)

    assert machine.problem() == ""
    machine.save(30)
    machine.on_disk(30)
    for reader in readers:
        reader.close()


def test_a_missing_folder_is_named_and_used_once_it_exists(machine_of: Callable[..., Machine], tmp_path: Path) -> None:
    missing = tmp_path / "not-mounted"
    machine = machine_of(disk_path=str(missing))
    machine.launch()
    machine.save(10)
    wait_for(
        lambda: f"{missing} does not exist on m1: make it, or mount it" in machine.problem(),
        "the missing folder is reported",
    )
    assert not missing.exists()
    missing.mkdir()
    machine.save(20)
    machine.on_disk(20)
    wait_for(lambda: machine.problem() == "", "the problem is over")
    assert machine.steps(disk_path=str(missing)) == {0: [20], 1: [20]}
    machine.lose_memory()
    machine.restore(0, 20)
    assert machine.holds(0, 20)


def test_the_newest_step_that_all_machines_have_is_kept(machine_of: Callable[..., Machine]) -> None:
    machine = machine_of(world=4)
    machine.launch()
    for step in (10, 20):
        machine.save(step)
        machine.on_disk(step)
    machine.persist(whole=20, settled=20, generation=1)
    for step in (30, 40, 50):  # another machine's full disk gets none of these
        machine.save(step)
        machine.on_disk(step)
    wait_for(lambda: machine.steps() == {0: [20, 40, 50], 1: [20, 40, 50]}, "steps that are too old are deleted")
    machine.persist(whole=50, settled=50, generation=1)
    machine.save(60)
    machine.on_disk(60)
    wait_for(lambda: machine.steps() == {0: [50, 60], 1: [50, 60]}, "step 20 is deleted too")


def test_a_slow_disk_gets_fewer_steps_and_this_is_reported(machine_of: Callable[..., Machine]) -> None:
    machine = machine_of(disk_every_steps=2)
    machine.launch()
    machine.save(2, 3, 4, 5, 6, 7, ranks=(0,))  # rank 0 is 5 steps ahead when rank 1 saves step 2
    machine.save(1, 2, ranks=(1,))
    wait_for(lambda: "5 steps went by while step 2 was written" in machine.problem(), "the slow disk is reported")
    assert "Only every 8th step is written: set disk_every_steps to 8 or more" in machine.problem()
    machine.save(3, 4, 5, 6, 7, ranks=(1,))
    assert machine.saved.of(0).disk_step == machine.saved.of(1).disk_step == 2
    machine.save(8)
    machine.on_disk(8)
    wait_for(lambda: machine.problem() == "", "the disk keeps up again")
    assert machine.steps() == {0: [2, 8], 1: [2, 8]}


@pytest.mark.parametrize(("slots", "both"), [(4, False), (5, True)])
def test_a_slow_disk_gets_its_step_although_a_backup_is_slow_too(
    machine_of: Callable[..., Machine], monkeypatch: pytest.MonkeyPatch, slots: int, both: bool
) -> None:
    began, go_on = threading.Event(), threading.Event()

    def slow(gate: Gate, moved: int) -> None:
        began.set()
        assert go_on.wait(20)

    machine = machine_of(slots=slots, ranks=(0,), world=1, size=9_000_000)
    machine.launch()
    machine.save(8, 9)
    with monkeypatch.context() as patch:
        patch.setattr(Gate, "__call__", slow)
        machine.save(10)
        assert began.wait(20)
        machine.save(11)
        backup = SlotReader(machine.ranks[0].path)
        assert backup.pin(Pin.BACKUP, 11)
        machine.save(12, 13, 14)
        assert (backup.header(11) is not None) is both, "with few slots, the slot for the backup is overwritten"
        backup.close()
        go_on.set()
        machine.on_disk(10)
    machine.save(20)
    machine.on_disk(20)


def test_pages_of_a_written_file_leave_the_page_cache(machine_of: Callable[..., Machine]) -> None:
    machine = machine_of(size=80_000_000, ranks=(0,), world=1)
    machine.launch()
    machine.save(10)
    machine.on_disk(10)
    (path,) = machine.place.state_dir.glob("checkpoints/gpt/step-*/rank-0.safetensors")
    assert resident_pages(path) * os.sysconf("SC_PAGE_SIZE") < 20_000_000


def resident_pages(path: Path) -> int:
    """Return the number of a file's pages in the page cache."""
    import ctypes
    import mmap

    size = path.stat().st_size
    with path.open("r+b") as file, mmap.mmap(file.fileno(), size) as mapped:
        pages = -(-size // mmap.PAGESIZE)
        found = (ctypes.c_ubyte * pages)()
        view = (ctypes.c_char * size).from_buffer(mapped)
        assert ctypes.CDLL(None).mincore(ctypes.byref(view), ctypes.c_size_t(size), found) == 0
        del view
        return sum(one & 1 for one in found)


def test_a_missing_folder_is_unknown_and_not_empty(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    try:
        [told] = [one for one in machine.held(disk_path=f"{tmp_path}/away") if one.completed_steps < 0]
        assert (told.tier, told.valid) == (DISK, False)
        assert told.reason == f"{tmp_path}/away cannot be listed: No such file or directory"
        (tmp_path / "away").mkdir()
        assert machine.held(disk_path=f"{tmp_path}/away") == []
    finally:
        machine.close()
