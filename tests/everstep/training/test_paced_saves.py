"""A rank saves at the pace to which its agent asks it to move, and measures what its saves need."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import everstep
from everstep.model.save_pace import SavePace
from everstep.rank import environment
from everstep.rank.step_reports import ReportFile
from everstep.slots.file import SlotFile
from everstep.slots.owner import SlotOwner
from everstep.slots.reader import SlotReader
from everstep.training.checkpoint import Checkpoint

StartRank = Callable[..., ReportFile]


class Counter:
    """A state that is one number."""

    def __init__(self) -> None:
        self.value = 0

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps after which ``Checkpoint.save`` is called."""
    steps: list[int] = []
    save = Checkpoint.save

    def note(self: Checkpoint, completed_steps: int) -> None:
        steps.append(completed_steps)
        save(self, completed_steps)

    monkeypatch.setattr(Checkpoint, "save", note)
    return steps


def train(total: int, *, body: Callable[[int], object] = lambda _: None) -> None:
    run = everstep.join()
    for step in run.steps(total, run.checkpoint(counter=Counter())):
        body(step)


def held(shm: Path) -> set[int]:
    reader = SlotReader(shm / "checkpoint-0", SlotOwner("", "", 0))
    try:
        return {header.completed_steps for header in reader.headers()}
    finally:
        reader.close()


def test_a_rank_begins_with_the_distance_of_its_report_file_and_saves_the_last_step(
    start_rank: StartRank, shm: Path, saved: list[int]
) -> None:
    reports = start_rank(slots=3)
    reports.ask_pace(SavePace(every=4))
    reports.set_pace(SavePace(every=4))
    train(10)
    assert saved == [4, 8, 10]
    assert held(shm) == {4, 8, 10}
    assert reports.snapshot().completed_steps == 10


def test_it_moves_when_it_is_asked_and_shows_that_after_its_next_save(start_rank: StartRank, saved: list[int]) -> None:
    reports = start_rank(slots=3)
    seen: list[tuple[int, SavePace]] = []

    def body(step: int) -> None:
        seen.append((step, reports.pace()))
        if step == 4:
            reports.ask_pace(SavePace(1, 4, True))

    train(9, body=body)
    assert saved == [1, 2, 3, 4, 8, 9]
    assert seen[7] == (7, SavePace())
    assert seen[8] == (8, SavePace(1, 4, True))


def test_a_step_that_is_due_on_disk_is_saved_at_any_pace(
    start_rank: StartRank, saved: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    reports = start_rank(slots=3)
    reports.set_pace(SavePace(every=4))
    reports.ask_pace(SavePace(every=4))
    monkeypatch.setenv(environment.DISK_EVERY_STEPS, "6")
    train(12)
    assert saved == [4, 6, 8, 12]


def test_training_waits_for_the_commit_only_at_a_waiting_pace(start_rank: StartRank, shm: Path) -> None:
    reports = start_rank(slots=4)
    committed: dict[bool, list[bool]] = {False: [], True: []}

    def body(step: int) -> None:
        pace = reports.pace()
        if step:
            committed[pace.waits].append(step in held(shm))
        if step == 5:
            reports.ask_pace(SavePace(1, 1, True))

    train(12, body=body)
    assert len(committed[True]) == 6
    assert all(committed[True])


def test_slow_saves_make_it_want_a_larger_distance(start_rank: StartRank, monkeypatch: pytest.MonkeyPatch) -> None:
    reports = start_rank(slots=3)
    commit = SlotFile.commit

    def slow(self: SlotFile, completed_steps: int) -> Any:
        time.sleep(0.3)
        return commit(self, completed_steps)

    monkeypatch.setattr(SlotFile, "commit", slow)
    train(8, body=lambda _: time.sleep(0.01))
    times = reports.save_times()
    assert times.wanted > 1
    assert times.save_s >= 0.3
    assert times.step_s < 0.3, "a step's time is measured without the wait for the save before"


def test_a_script_without_a_state_reports_steps_and_saves_nothing(start_rank: StartRank, saved: list[int]) -> None:
    reports = start_rank()
    for _ in everstep.join().steps(3):
        pass
    assert not saved
    assert reports.snapshot().completed_steps == 3
    assert reports.save_times().save_s == 0


def test_a_save_that_is_left_out_leaves_gradients_to_the_script(start_rank: StartRank, shm: Path) -> None:
    reports = start_rank(slots=3)
    reports.set_pace(SavePace(every=3))
    reports.ask_pace(SavePace(every=3))
    run = everstep.join()
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in run.steps(9, run.checkpoint(model=model, optimizer=optimizer)):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert held(shm) == {3, 6, 9}
