"""Saves that overlap training: what is committed is what was there, and nothing waits that need not."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import everstep
from everstep import environment
from everstep.errors import CheckpointError
from everstep.faults import RankFaults
from everstep.slots.file import SlotFile
from everstep.slots.reader import held
from everstep.training.checkpoint import Checkpoint, Stateful
from everstep.training.codec import decode


class Pause:
    """Stops the copying thread when a part of a save is copied, until it may go on."""

    def __init__(self) -> None:
        self.reached, self.go = threading.Event(), threading.Event()

    def meet(self, point: str, step: int) -> None:
        assert point == "save"
        self.reached.set()
        assert self.go.wait(30)


def steps_in(path: Path) -> list[int]:
    return sorted(slot.completed_steps for slot in held(path) if slot.valid)


def saved(path: Path, step: int) -> Any:
    payload = SlotFile(path).load(step)
    return decode(payload.structure, payload.tensors, {})


class Training:
    """A model with and without optimizers, buffers, large and small tensors."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.entry = nn.Linear(64, 512)
        self.last = nn.Linear(512, 64, bias=False)
        self.model = nn.Sequential(self.entry, nn.BatchNorm1d(512), self.last)
        self.turned = nn.Parameter(torch.randn(200, 100).T)
        self.free = nn.Linear(8, 8)
        self.first = torch.optim.AdamW([*self.entry.parameters(), self.turned], fused=True)
        self.second = torch.optim.SGD(self.last.parameters(), momentum=0.9, lr=0.01)
        self.things: dict[str, Stateful] = {
            "model": self.model,
            "free": self.free,
            "first": self.first,
            "second": self.second,
        }

    def backward(self, *, accumulate: bool = False) -> None:
        if not accumulate:
            self.first.zero_grad()
            self.model.zero_grad()
        (self.model(torch.randn(4, 64)).square().mean() + self.turned.square().mean()).backward()

    def gradients(self) -> list[tuple[str, torch.Tensor]]:
        """The parameters by the names that their gradients have in a save."""
        named = [(f"model.{name}", parameter) for name, parameter in self.model.named_parameters()]
        return [*named, ("first.0.2", self.turned)]

    def snapshot(self) -> Any:
        """All that is to be saved, as it is now."""
        return clone({name: thing.state_dict() for name, thing in self.things.items()})


def clone(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        return tree.detach().clone()
    if isinstance(tree, dict):
        return {key: clone(value) for key, value in tree.items()}
    return [clone(item) for item in tree] if isinstance(tree, list) else tree


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and raw(left) == raw(right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(same(a, b) for a, b in zip(left, right, strict=True))
    return bool(left == right)


def raw(tensor: torch.Tensor) -> bytes:
    """The bits, so that NaN equals itself."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def without_ours(tree: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in tree.items() if not name.startswith("everstep.")}


@pytest.fixture
def make(shm: Path) -> Iterator[Callable[..., Checkpoint]]:
    """Make a checkpoint that overlaps; closed at the end."""
    made = []

    def make(things: Any, pause: Pause | None = None, **options: Any) -> Checkpoint:
        checkpoint = Checkpoint(
            things, SlotFile(shm / "c"), **{"overlap": True, "faults": cast(RankFaults, pause), **options}
        )
        made.append((checkpoint, pause))
        return checkpoint

    yield make
    for checkpoint, pause in made:
        if pause is not None:
            pause.go.set()
        checkpoint.close()


def test_training_goes_on_and_the_step_waits(make: Callable[..., Checkpoint], shm: Path) -> None:
    training, pause = Training(), Pause()
    training.backward()
    training.first.step()
    checkpoint = make(training.things, pause)
    expected = training.snapshot()
    checkpoint.save(1)
    assert pause.reached.wait(30)
    training.backward()  # changes the BatchNorm's statistics
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


@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(st.sampled_from(EVENTS), max_size=5), min_size=1, max_size=8), st.integers(0, 2000))
@pytest.mark.filterwarnings("ignore:everstep. .* was changed outside of optimizer.step:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:everstep. gradients that optimizer.step.. had used:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step:UserWarning")
def test_what_is_committed_is_what_was_there(bodies: list[list[str]], microseconds: int) -> None:
    """Whatever bodies do: gradients accumulate, steps are skipped, somebody changes parameters where he must not."""

    class Slow(Pause):
        def meet(self, point: str, step: int) -> None:
            time.sleep(microseconds / 1e6)

    folder = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="everstep-test-"))
    training = Training()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    schedule = torch.optim.lr_scheduler.StepLR(training.second, 1)
    average = torch.optim.swa_utils.AveragedModel(training.model)
    training.things |= {"scaler": scaler, "schedule": schedule, "average": average}
    checkpoint = Checkpoint(training.things, SlotFile(folder / "c"), overlap=True, faults=cast(RankFaults, Slow()))

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
        assert steps_in(shm / "c") == [1], "a kill before the next step must not leave the mixture"
    training.backward()
    with pytest.warns(RuntimeWarning, match=r"'model\.0\.weight' was changed outside of optimizer\.step\(\) while"):
        training.first.step()
    checkpoint.wait()
    assert steps_in(shm / "c") == [1]
    # From now on it waits: the same change does no harm.
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
        def meet(self, point: str, step: int) -> None:
            if step == 1:
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


def test_close_ends_the_thread_unhooks_and_keeps_nothing_alive(make: Callable[..., Checkpoint], shm: Path) -> None:
    from torch.optim import optimizer

    before = len(optimizer._global_optimizer_pre_hooks)
    training = Training()
    checkpoint = make(training.things)
    checkpoint.save(1)
    checkpoint.close()
    assert len(optimizer._global_optimizer_pre_hooks) == before
    assert "everstep saves" not in {thread.name for thread in threading.enumerate()}
    assert steps_in(shm / "c") == [1]
    assert str(shm / "c") not in Path("/proc/self/maps").read_text()


def test_growing_state_moves_to_the_new_file(make: Callable[..., Checkpoint], shm: Path) -> None:
    training = Training()  # no optimizer state before the first step
    checkpoint = make(training.things)
    for step in range(4):
        checkpoint.save(step)
        training.backward()
        training.first.step()
        if step > 1:
            training.second.step()
    checkpoint.save(4)
    expected = training.snapshot()
    checkpoint.wait()
    assert steps_in(shm / "c") == [2, 3, 4]
    assert same(without_ours(saved(shm / "c", 4)), expected)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_neither_waits_nor_saves(make: Callable[..., Checkpoint], shm: Path) -> None:
    training, pause = Training(), Pause()
    checkpoint = make(training.things, pause)
    checkpoint.save(1)
    assert pause.reached.wait(30)
    pid = os.fork()
    if pid == 0:  # a data loader's worker, say
        training.second.step()
        checkpoint.drain()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    pause.go.set()
    checkpoint.wait()
    assert steps_in(shm / "c") == [1]


LEAVING = """
import torch
import everstep
run = everstep.join()
model = torch.nn.Linear(2000, 1000)
optimizer = torch.optim.AdamW(model.parameters())
for step in run.steps(6, run.checkpoint(model=model, optimizer=optimizer)):
    if step == 3:
        raise IndexError("in user code")
    model(torch.ones(1, 2000)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_an_exception_ends_the_process_and_the_last_complete_step_is_kept(start_rank: Any, shm: Path) -> None:
    start_rank(slots=3)
    done = subprocess.run([sys.executable, "-c", LEAVING], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and "IndexError: in user code" in done.stderr
    assert steps_in(shm / "checkpoint-0") == [1, 2, 3]


def test_a_kill_in_the_middle_of_the_copy_costs_no_step_before(start_rank: Any, shm: Path) -> None:
    start_rank(slots=3)
    plan = shm / "plan.json"
    plan.write_text(json.dumps([{"id": "f", "fault": "kill-during-save", "rank": 0, "at_step": 2, "point": "save"}]))
    done = subprocess.run(
        [sys.executable, "-c", LEAVING],
        env={**os.environ, environment.FAULTS: str(plan)},
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    slots = held(shm / "checkpoint-0")
    assert sorted(slot.completed_steps for slot in slots if slot.valid) == [1, 2]
    assert "a save into it was cut short" in {slot.reason for slot in slots}


@pytest.mark.parametrize("way", ["raise", "exit", "break", "end"])
def test_however_a_loop_ends_the_last_complete_step_is_kept(start_rank: Any, shm: Path, way: str) -> None:
    start_rank(slots=3)
    run, training = everstep.join(), Training()
    with contextlib.suppress(IndexError, SystemExit):
        for step in run.steps(3 if way == "end" else 6, run.checkpoint(**training.things)):
            if step == 3 and way == "raise":
                raise IndexError
            if step == 3 and way == "exit":
                raise SystemExit(3)
            if step == 3:
                break
            training.backward()
            training.first.step()
    assert steps_in(shm / "checkpoint-0") == [1, 2, 3]
    run.finish()


def test_two_slots_and_the_switch_turn_the_overlap_off(start_rank: Any, shm: Path, monkeypatch: Any) -> None:
    for slots, switch, expected in ((2, "1", True), (3, "0", True), (3, "1", False)):
        monkeypatch.setenv(environment.CHECKPOINT_OVERLAP, switch)
        start_rank(slots=slots)
        (shm / "checkpoint-0").unlink(missing_ok=True)
        training = Training()
        checkpoint = everstep.join().checkpoint(**training.things)
        checkpoint.save(1)
        in_this_thread = "everstep saves" not in {thread.name for thread in threading.enumerate()}
        assert in_this_thread == expected
        checkpoint.close()


@pytest.mark.parametrize("overlap", [True, False])
def test_slots_are_made_ready_between_saves(make: Callable[..., Checkpoint], shm: Path, overlap: bool) -> None:
    training = Training()
    checkpoint = make(training.things, overlap=overlap)
    training.backward()
    training.first.step()
    path, deadline = shm / "c", time.monotonic() + 30
    checkpoint.save(1)
    checkpoint.wait()
    if overlap:  # by the copying thread; without one each save sees to its own slot
        while path.stat().st_blocks * 512 < path.stat().st_size:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    for step in (2, 3):
        checkpoint.save(step)
        checkpoint.wait()
    assert path.stat().st_blocks * 512 == path.stat().st_size


def test_want_of_room_ends_neither_the_thread_nor_a_save_that_has_its_slot(
    make: Callable[..., Checkpoint], shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training()
    checkpoint = make(training.things)
    real, full = os.posix_fallocate, threading.Event()

    def fallocate(descriptor: int, offset: int, length: int) -> None:
        if full.is_set() and threading.current_thread() is not threading.main_thread():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor, offset, length)

    full.set()
    monkeypatch.setattr(os, "posix_fallocate", fallocate)
    for step in (1, 2, 3, 4):
        checkpoint.save(step)
        checkpoint.wait()
    assert sorted(slot.completed_steps for slot in held(shm / "c") if slot.valid) == [2, 3, 4]


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
