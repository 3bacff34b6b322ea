"""Slots are pinned piece by piece while no save copies, and stay so until they grow or the process ends."""

from __future__ import annotations

import gc
import mmap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.slots.file import SlotFile
from everstep.slots.format import slot_at
from everstep.training.copies import copier as module
from everstep.training.copies.pinned_memory import PinnedMemory
from tests.everstep.slots.saved import save
from tests.everstep.training.recording_cuda import RecordingCuda
from tests.shm import shm_folder

GPU = torch.device("cuda", 1)
PIECE = 1 << 16


def until(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "it did not become true"
        time.sleep(0.002)


def all_pinned(cuda: RecordingCuda, path: Path, buffer: int) -> bool:
    """Whether the slots of a file with three slots are pinned, beside a buffer of some bytes."""
    return sum(cuda.registered.copy().values()) == path.stat().st_size - slot_at(3) + buffer


@pytest.fixture(autouse=True)
def small_pieces() -> Iterator[None]:
    with mock.patch.object(module, "PIECE", PIECE):
        yield


def test_slots_are_pinned_in_pieces_and_the_slot_of_the_next_save_comes_first(shm: Path) -> None:
    cuda, file = RecordingCuda(), SlotFile(shm / "c")
    memory = PinnedMemory(cuda, GPU, file)
    for step in (1, 2, 3):
        save(file, step, 3 * PIECE)
    by_use = [region.address for region in file.regions()]
    memory.resume()
    until(lambda: all_pinned(cuda, shm / "c", 0))
    assert all(length <= PIECE for length in cuda.registered.values())
    begun = [address for address in cuda.registered if address in by_use]
    assert begun == by_use
    assert {call.thread for call in cuda.calls} == {"everstep pins"} and {call.device for call in cuda.calls} == {1}
    assert [memory.pinned(region.address) for region in file.regions()] == [region.room for region in file.regions()]
    calls = len(cuda.calls)
    memory.resume()
    memory.close()
    assert len(cuda.calls) == calls, "nothing is pinned twice"


def test_memory_is_prepared_before_it_is_pinned(shm: Path) -> None:
    """CUDA would make the pages present one by one, while other calls to it wait."""
    cuda, file, seen = RecordingCuda(), SlotFile(shm / "c"), []
    real = cuda.register

    def register(address: int, length: int) -> int:
        region = next(one for one in file.regions() if one.address <= address < one.address + one.room)
        seen.append(region.present >= address + length - region.address)
        return real(address, length)

    memory = PinnedMemory(cuda, GPU, file)
    save(file, 1, 3 * PIECE)  # the other slots have no memory yet
    with mock.patch.object(cuda, "register", register):
        memory.resume()
        until(lambda: all_pinned(cuda, shm / "c", 0))
    assert len(seen) > 9 and all(seen)


def test_a_slot_that_grows_is_unpinned_before_its_memory_is_freed_and_pinned_again(shm: Path) -> None:
    cuda, file = RecordingCuda(), SlotFile(shm / "c")
    memory = PinnedMemory(cuda, GPU, file)
    for step in (1, 2, 3):
        save(file, step, 3 * PIECE)
    memory.resume()
    until(lambda: all_pinned(cuda, shm / "c", 0))
    grown, *others = [region.address for region in file.regions()]
    save(file, 4, 20 * PIECE)
    assert memory.pinned(grown) == 0 and not any(grown <= address < grown + 3 * PIECE for address in cuda.registered)
    assert all(memory.pinned(address) for address in others), "other slots stay pinned"
    memory.resume()
    until(lambda: sum(map(memory.pinned, (region.address for region in file.regions()))) > 26 * PIECE)
    memory.close()


def test_at_the_end_nothing_is_unpinned_and_what_is_pinned_stays_mapped(shm: Path) -> None:
    """CUDA would copy into old pages if other memory got the address of a pinned slot."""
    cuda, file = RecordingCuda(), SlotFile(shm / "c")
    memory = PinnedMemory(cuda, GPU, file)
    save(file, 1, 3 * PIECE)
    memory.resume()
    until(lambda: all_pinned(cuda, shm / "c", 0))
    addresses = [region.address for region in file.regions()]
    memory.close()
    file.close()
    del memory, file
    gc.collect()
    assert "unpin" not in cuda.log
    begins = {int(line.split("-")[0], 16) for line in Path("/proc/self/maps").read_text().splitlines()}
    assert begins.issuperset(addresses)


def test_without_permission_to_pin_there_is_one_warning_and_slots_are_still_prepared(shm: Path) -> None:
    cuda, file = RecordingCuda(), SlotFile(shm / "c")
    cuda.refuses = 2
    memory = PinnedMemory(cuda, GPU, file)
    with pytest.warns(RuntimeWarning, match=r"cannot pin 3 MB of the checkpoint's memory \(error 2\)"):
        assert not memory.pin_buffer(mmap.mmap(-1, 3_000_000))
    save(file, 1, 3 * PIECE)
    memory.pin_slot(file.regions()[-1].address)  # warns no second time
    memory.resume()
    until(lambda: all(region.present == region.room for region in file.regions()))
    memory.close()
    assert cuda.log == ["pin"]
    cuda.launch()  # the failed call left no error in this thread


def test_a_slot_is_pinned_as_a_whole_for_a_restore(shm: Path) -> None:
    cuda, file = RecordingCuda(), SlotFile(shm / "c")
    memory = PinnedMemory(cuda, GPU, file)
    save(file, 1, 3 * PIECE)
    *others, region = file.regions()
    memory.pin_slot(region.address)
    assert cuda.registered == {region.address: region.room}
    memory.resume()
    until(lambda: all_pinned(cuda, shm / "c", 0))
    assert cuda.registered[region.address] == region.room, "it stays pinned"
    memory.pin_slot(others[0].address)  # it was pinned in pieces
    assert cuda.registered[others[0].address] == others[0].room
    calls = len(cuda.calls)
    memory.pin_slot(others[0].address)
    assert len(cuda.calls) == calls
    memory.close()


def test_an_error_of_pinning_is_raised_in_the_caller(shm: Path) -> None:
    def unknown(device: torch.device) -> None:
        raise RuntimeError(f"no {device}")

    cuda, file = RecordingCuda(), SlotFile(shm / "c")
    save(file, 1)
    with mock.patch.object(cuda, "set_device", unknown), pytest.raises(RuntimeError, match="no cuda:1"):
        PinnedMemory(cuda, GPU, file).pin_slot(file.regions()[-1].address)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["save", "save", "given up", "resume", "pause", "restore"]), st.integers(1, 5 * PIECE)
        ),
        max_size=16,
    )
)
def test_pinned_memory_is_always_mapped_memory_of_the_file(events: list[tuple[str, int]]) -> None:
    """So CUDA never has pages of a slot that has grown."""
    with shm_folder() as folder:
        cuda, file = RecordingCuda(), SlotFile(folder / "c")
        memory = PinnedMemory(cuda, GPU, file)
        for step, (event, size) in enumerate(events):
            if event == "save":
                memory.pause()
                save(file, step, size)
            elif event == "given up":  # before the slot was allocated, so the old memory is freed by the next save
                memory.pause()
                file.begin(b"", size, parts=())
                file.abort()
            elif event == "resume":
                memory.resume()
            elif event == "pause":
                memory.pause()
            elif regions := file.regions():
                memory.pin_slot(regions[-1].address)
            with file._memory:
                regions = [*file.regions(), *file._replaced]
                mapped = [(region.address, region.address + region.room) for region in regions]
            for address, length in cuda.registered.copy().items():
                assert any(begin <= address and address + length <= end for begin, end in mapped)
        memory.close()
        for region in file.regions():
            own = sum(
                length
                for address, length in cuda.registered.items()
                if region.address <= address < region.address + region.room
            )
            assert memory.pinned(region.address) == own
        file.close()
