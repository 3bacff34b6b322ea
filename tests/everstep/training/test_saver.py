"""Saves that overlap training commit only unchanged states, and delay training only where they must."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from everstep.errors import CheckpointError
from everstep.slots.file import SlotFile
from everstep.training.checkpoint import Checkpoint
from tests.everstep.training.overlapped import Pause, Training, clone, same, saved, steps_in, without_ours


def test_training_goes_on_and_the_step_waits(make: Callable[..., Checkpoint], shm: Path) -> None:
    training, pause = Training(), Pause()
    training.backward()
    training.first.step()
    checkpoint = make(training.things, pause)
    expected = training.snapshot()
    checkpoint.save(1)
    assert pause.reached.wait(30)
    training.backward()  # this changes the BatchNorm's statistics
    stepping = threading.Thread(target=training.first.step)
    stepping.start()
    stepping.join(0.2)
    assert stepping.is_alive()
    assert steps_in(shm / "c") == []
    pause.go.set()
    stepping.join(30)
    assert not stepping.is_alive()
    checkpoint.wait()
    assert steps_in(shm / "c") == [1]
    assert same(without_ours(saved(shm / "c", 1)), expected)
    assert not same(training.snapshot(), expected)


def test_the_next_save_waits_for_the_one_before(make: Callable[..., Checkpoint], shm: Path) -> None:
    training, pause = Training(), Pause()
    checkpoint = make(training.things, pause)
    checkpoint.save(1)
    saving = threading.Thread(target=checkpoint.save, args=[2])
    saving.start()
    saving.join(0.2)
    assert saving.is_alive()
    pause.go.set()
    saving.join(30)
    checkpoint.wait()
    assert steps_in(shm / "c") == [1, 2]


EVENTS = [
    "forward",
    "zero",
    "zeros",
    "first",
    "second",
    "closure",
    "scaled",
    "inf",
    "schedule",
    "average",
    "tamper",
    "data",
    "sleep",
]


@settings(max_examples=25)
@given(st.lists(st.lists(st.sampled_from(EVENTS), max_size=5), min_size=1, max_size=8), st.integers(0, 2000))
@pytest.mark.filterwarnings("ignore:everstep. .* was changed outside of optimizer.step:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:everstep. gradients that optimizer.step.. had used:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step:UserWarning")
def test_what_is_committed_is_what_was_there(bodies: list[list[str]], microseconds: int) -> None:
    """A committed state is correct even if gradients accumulate, steps are skipped or parameters change too early."""

    class Slow(Pause):
        def meet(self, _completed_steps: int) -> None:
            time.sleep(microseconds / 1e6)

    folder = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="everstep-test-"))
    training = Training()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    schedule = torch.optim.lr_scheduler.StepLR(training.second, 1)
    average = torch.optim.swa_utils.AveragedModel(training.model)
    training.things |= {"scaler": scaler, "schedule": schedule, "average": average}
    checkpoint = Checkpoint(training.things, SlotFile(folder / "c"), overlap=True)
    checkpoint.call_midway(Slow().meet)

    def act(event: str) -> None:
        match event:
            case "forward":
                training.backward(accumulate=True)
            case "zero":
                training.first.zero_grad()
            case "zeros":
                training.second.zero_grad(set_to_none=False)
            case "first":
                training.first.step()
            case "second":
                training.second.step()
            case "closure":
                training.second.step(lambda: training.model(torch.randn(4, 64)).sum())
            case "scaled" | "inf":
                loss = training.model(torch.randn(4, 64)).square().mean()
                scaler.scale(loss * (float("inf") if event == "inf" else 1)).backward()
                scaler.step(training.second)
                scaler.update()
                training.second.zero_grad()
            case "schedule":
                schedule.step()
            case "average":
                average.update_parameters(training.model)
            case "tamper":
                with torch.no_grad():
                    training.entry.weight.mul_(1.01)
            case "data":
                training.last.weight.data.mul_(1.01)
            case "sleep":
                time.sleep(0.002)

    try:
        expected, gradients = {}, {}
        for step, body in enumerate([["forward", "first"], *bodies]):
            for event in body:
                act(event)
            expected[step] = training.snapshot()
            gradients[step] = {name: clone(one.grad) for name, one in training.gradients() if one.grad is not None}
            checkpoint.save(step)
        checkpoint.wait()
        steps = steps_in(folder / "c")
        assert steps[-1] == len(bodies)
        for step in steps:
            state = saved(folder / "c", step)
            assert same(without_ours(state), expected[step])
            kept = state.get("everstep.gradients", {}).get("tensors", {})
            assert all(same(grad, gradients[step][name]) for name, grad in kept.items())
    finally:
        checkpoint.close()
        shutil.rmtree(folder)


@pytest.mark.parametrize("by_data", [False, True])
@pytest.mark.parametrize("when", ["in the copy", "after it"])
def test_a_change_outside_of_the_step_gives_the_save_up(
    make: Callable[..., Checkpoint], shm: Path, when: str, by_data: bool
) -> None:
    training, pause = Training(), Pause()
    checkpoint = make(training.things, pause)
    pause.go.set()
    checkpoint.save(1)
    checkpoint.wait()
    pause.reached.clear()
    pause.go.clear()
    checkpoint.save(2)
    assert pause.reached.wait(30)
    if when == "after it":
        pause.go.set()
        while steps_in(shm / "c") != [1, 2]:
            time.sleep(0.001)
    with torch.no_grad():
        (training.entry.weight.data if by_data else training.entry.weight).mul_(2)
    pause.go.set()
    if when == "in the copy":
        checkpoint.drain()
        assert steps_in(shm / "c") == [1], (
            "the mixture of two states must not count, even if a kill comes before the next step"
        )
    training.backward()
    with pytest.warns(RuntimeWarning, match=r"'model\.0\.weight' was changed outside of optimizer\.step\(\) while"):
        training.first.step()
    checkpoint.wait()
    assert steps_in(shm / "c") == [1]
    # From now on the optimizer waits for the copy, so the same change does no harm.
    expected = training.snapshot()
    checkpoint.save(3)
    with torch.no_grad():
        training.entry.weight.mul_(2)
    training.second.step()
    checkpoint.wait()
    assert steps_in(shm / "c") == [1, 3]
    assert same(without_ours(saved(shm / "c", 3)), expected)


def test_an_optimizer_that_steps_past_the_hook_is_found_out(make: Callable[..., Checkpoint], shm: Path) -> None:
    training = Training()
    checkpoint = make(training.things)
    training.backward()
    checkpoint.save(1)
    type(training.second).step.__wrapped__(training.second)  # type: ignore[attr-defined]
    with pytest.warns(RuntimeWarning, match=r"'model\.2\.weight' was changed outside"):
        checkpoint.save(2)
    checkpoint.wait()
    assert steps_in(shm / "c") == [2]


def test_the_thread_s_error_is_raised_where_somebody_waits(make: Callable[..., Checkpoint], shm: Path) -> None:
    class Broken(Pause):
        def meet(self, completed_steps: int) -> None:
            if completed_steps == 2:
                raise OSError("no more paper")

    training = Training()
    checkpoint = make(training.things, Broken())
    ways: list[Callable[[Checkpoint], None]] = [
        lambda checkpoint: checkpoint.save(3),
        lambda checkpoint: checkpoint.wait(),
        lambda _: training.first.step(),
    ]
    for way in ways:
        checkpoint.save(1)
        checkpoint.wait()
        checkpoint.save(2)
        time.sleep(0.05)
        training.backward()
        with pytest.raises(CheckpointError, match="the state after step 2 could not be saved: no more paper"):
            way(checkpoint)
        assert steps_in(shm / "c") == [1]
        checkpoint = make(training.things, Broken())


def test_without_an_optimizer_of_torch_only_the_commit_overlaps(make: Callable[..., Checkpoint], shm: Path) -> None:
    model = nn.Linear(300, 300)
    checkpoint = make({"model": model})
    expected = clone(model.state_dict())
    checkpoint.save(1)
    with torch.no_grad():
        model.weight.zero_()
    checkpoint.wait()
    assert same(saved(shm / "c", 1)["model"], expected)


def test_without_overlap_a_save_is_committed_when_it_returns(make: Callable[..., Checkpoint], shm: Path) -> None:
    training = Training()
    checkpoint = make(training.things, overlap=False)
    for step in range(3):
        training.backward()
        training.first.step()
        checkpoint.save(step)
        assert step in steps_in(shm / "c")
    assert "everstep saves" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize("overlap", [True, False])
def test_slots_are_made_ready_between_saves(make: Callable[..., Checkpoint], shm: Path, overlap: bool) -> None:
    training = Training()
    checkpoint = make(training.things, overlap=overlap)
    training.backward()
    training.first.step()
    path, deadline = shm / "c", time.monotonic() + 30
    checkpoint.save(1)
    checkpoint.wait()
    if overlap:  # the copying thread fills the other slots; without that thread, each save fills its own slot
        while path.stat().st_blocks * 512 < path.stat().st_size:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    for step in (2, 3):
        checkpoint.save(step)
        checkpoint.wait()
    assert path.stat().st_blocks * 512 == path.stat().st_size


class Allocations:
    """Counts the bytes that each thread allocates in slot files, and refuses them while ``full``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._real = os.posix_fallocate
        self.full = False
        """Whether threads other than the main thread get no memory."""
        self.main = self.others = 0
        monkeypatch.setattr(os, "posix_fallocate", self._allocate)

    def _allocate(self, descriptor: int, offset: int, length: int) -> None:
        is_main = threading.current_thread() is threading.main_thread()
        if self.full and not is_main:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._real(descriptor, offset, length)
        if is_main:
            self.main += length
        else:
            self.others += length


def test_memory_of_new_and_of_larger_slots_is_allocated_while_training_continues(
    make: Callable[..., Checkpoint], shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training()
    checkpoint = make(training.things)
    allocations = Allocations(monkeypatch)
    for step in range(1, 7):
        if step == 4:
            training.backward()
            training.first.step()  # the optimizer makes its moments, so the slots grow
            training.first.zero_grad()
            training.model.zero_grad()
        expected = training.snapshot()
        size = (shm / "c").stat().st_size if step > 1 else 0
        checkpoint.save(step)
        checkpoint.wait()
        assert same(without_ours(saved(shm / "c", step)), expected)
        assert ((shm / "c").stat().st_size > size) is (step in {1, 4, 5, 6})
    assert allocations.others > 5 * allocations.main > 0
    assert steps_in(shm / "c") == [4, 5, 6]


def test_want_of_room_reaches_the_script_and_costs_neither_the_thread_nor_the_next_save(
    make: Callable[..., Checkpoint], shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training()
    checkpoint = make(training.things)
    allocations = Allocations(monkeypatch)
    allocations.full = True
    for step in (1, 2):
        checkpoint.save(step)  # training goes on before the slot is allocated
        with pytest.raises(CheckpointError, match=rf"after step {step} could not be saved: no room for checkpoints"):
            checkpoint.wait()
    allocations.full = False
    checkpoint.save(3)
    checkpoint.wait()
    allocations.full = True  # the slots that are not used yet cannot be prepared
    checkpoint.save(4)
    with contextlib.suppress(CheckpointError):  # the slot may have been prepared before
        checkpoint.wait()
    allocations.full = False
    for step in (5, 6):
        checkpoint.save(step)
        checkpoint.wait()
    assert steps_in(shm / "c")[-2:] == [5, 6]


def test_the_copying_thread_pushes_no_step_aside(shm: Path) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters())
    checkpoint = Checkpoint({"model": model, "optimizer": optimizer}, SlotFile(shm / "c"), overlap=True)
    before = set(threading.enumerate())
    checkpoint.save(1)
    checkpoint.wait()
    (copying,) = set(threading.enumerate()) - before
    assert copying.native_id is not None
    assert os.sched_getscheduler(copying.native_id) == os.SCHED_BATCH
    checkpoint.close()
