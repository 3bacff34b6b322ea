"""A job of one rank that starts from the checkpoint of a job of two ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import everstep
from everstep.errors import CheckpointError, ConfigError
from everstep.model.topology import Topology
from everstep.rank import environment
from everstep.rank.step_reports import ReportFile
from everstep.slots.reader import held
from everstep.training.rng import RandomState
from tests.everstep.training.old_jobs import STEP, Tree, bits, save_all

StartRank = Callable[..., ReportFile]


class Training:
    """A small model and its optimizer."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
        self.optimizer = torch.optim.Adam(self.model.parameters())

    def step(self) -> None:
        self.model(torch.rand(3, 4)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> Tree:
        state: dict[str, Any] = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        return state | {"everstep.rng": RandomState().state_dict()}

    def parameters(self) -> list[Any]:
        return [bits(parameter.detach()) for parameter in self.model.parameters()]


@pytest.fixture
def old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Training, Path]:
    """Return rank 0 of the old job, in which both ranks were equal, and the old job's checkpoint on disk."""
    training = Training(1)
    for _ in range(2):
        training.step()
    folder = save_all(tmp_path, Topology.of(1, 2), {"dp": 2}, lambda *_: training.state())
    monkeypatch.setenv(environment.RESHARD_FROM, str(folder))
    return training, folder


@pytest.mark.parametrize("told", [0, STEP])
def test_it_goes_on_where_the_old_job_was(
    start_rank: StartRank, shm: Path, old: tuple[Training, Path], told: int
) -> None:
    start_rank(resume=told)
    before, _ = old
    expected = torch.get_rng_state()
    training = Training(2)
    run = everstep.join()
    steps: list[int] = []
    for step in run.steps(STEP + 2, run.checkpoint(model=training.model, optimizer=training.optimizer)):
        if not steps:
            assert torch.equal(torch.get_rng_state(), expected)
            assert training.parameters() == before.parameters()
            own = [slot.completed_steps for slot in held(shm / "checkpoint-0") if slot.valid]
            assert own == [STEP]  # from now on the job is like any other job
        training.step()
        steps.append(step)
    assert steps == [STEP, STEP + 1] and run.resumed_from == STEP
    torch.set_rng_state(expected)
    for _ in range(2):
        before.step()
    assert training.parameters() == before.parameters()


def test_what_it_saved_itself_comes_first(start_rank: StartRank, shm: Path, old: tuple[Training, Path]) -> None:
    start_rank()
    training = Training(2)
    run = everstep.join()
    for _ in run.steps(STEP + 1, run.checkpoint(model=training.model, optimizer=training.optimizer)):
        training.step()
    for path in old[1].iterdir():
        path.unlink()
    again = Training(3)
    start_rank(2, resume=STEP + 1)
    run = everstep.join()
    assert list(run.steps(STEP + 1, run.checkpoint(model=again.model, optimizer=again.optimizer))) == []
    assert again.parameters() == training.parameters()


def test_a_script_with_other_parts_is_told(start_rank: StartRank, old: tuple[Training, Path]) -> None:
    start_rank()
    run = everstep.join()
    with pytest.raises(CheckpointError, match="has model, optimizer, but the script names model"):
        next(iter(run.steps(9, run.checkpoint(model=Training(2).model))))


def test_a_folder_that_is_none_of_a_step_is_named(
    start_rank: StartRank, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    start_rank()
    monkeypatch.setenv(environment.RESHARD_FROM, str(tmp_path))
    run = everstep.join()
    with pytest.raises(ConfigError, match=r"EVERSTEP_RESHARD_FROM is .* must be the folder of one step"):
        next(iter(run.steps(9, run.checkpoint(model=Training(2).model))))
