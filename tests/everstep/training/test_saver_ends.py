"""Saves overlap training. Here the training ends meanwhile: by itself, by an error or by a kill."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import everstep
from everstep.rank import environment
from everstep.slots.reader import held
from everstep.training.checkpoint import Checkpoint
from tests.everstep.training.overlapped import Pause, Training, same, saved, steps_in, without_ours


def test_a_close_ends_the_thread_and_removes_hooks_and_mappings(make: Callable[..., Checkpoint], shm: Path) -> None:
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
    training = Training()  # its optimizers have no state before their first step
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
    if pid == 0:  # the child is, for example, a data loader's worker
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


def test_a_kill_during_a_copy_costs_no_earlier_step(start_rank: Any, shm: Path) -> None:
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
def test_the_last_complete_step_is_kept_however_the_loop_ends(start_rank: Any, shm: Path, way: str) -> None:
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


def test_with_two_slots_or_the_switch_off_saves_do_not_overlap(start_rank: Any, shm: Path, monkeypatch: Any) -> None:
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
