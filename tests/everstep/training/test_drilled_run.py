"""A fault of a drill acts at its planned point of a step, and a rank without faults has a plain run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import everstep
from everstep.rank import environment
from everstep.rank.step_reports import ReportFile
from everstep.slots.reader import held
from everstep.training.drilled_run import DrilledRun
from everstep.training.run import Run

StartRank = Callable[..., ReportFile]


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def write(**fault: object) -> None:
        path = tmp_path / "plan.json"
        path.write_text(json.dumps([{"id": "f0", "fault": "raise", "exception": "IndexError", "at_step": 2, **fault}]))
        monkeypatch.setenv(environment.FAULTS, str(path))

    return write


def train(run: Run, events: list[str]) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    state = run.checkpoint(model=model, optimizer=optimizer)
    for step in run.steps(4, state):
        events.append(f"begin {step}")
        optimizer.zero_grad()
        model(torch.ones(2)).sum().backward()
        optimizer.step()
        events.append(f"optimizer {step}")
        run.report(step, loss=1.0)


@pytest.mark.parametrize(
    ("point", "last", "saved"),
    [("begin", "optimizer 1", {1, 2}), ("step", "begin 2", {1, 2}), ("save", "optimizer 2", {2})],
)
def test_a_fault_acts_where_it_is_planned(
    start_rank: StartRank, shm: Path, plan: Callable[..., None], point: str, last: str, saved: set[int]
) -> None:
    plan(rank=0, point=point)
    start_rank()
    run, events = everstep.join(), list[str]()
    assert isinstance(run, DrilledRun)
    with pytest.raises(IndexError):
        train(run, events)
    assert events[-1] == last
    assert {copy.completed_steps for copy in held(shm / "checkpoint-0") if copy.valid} == saved


def test_a_script_that_only_reports_meets_a_fault_in_its_report(
    start_rank: StartRank, plan: Callable[..., None]
) -> None:
    plan(rank=0)
    reports, run = start_rank(), everstep.join()
    run.report(1, loss=1.0)
    with pytest.raises(IndexError):
        run.report(2, loss=1.0)
    assert reports.snapshot().published == 1


def test_a_rank_for_which_nothing_is_planned_has_a_plain_run(start_rank: StartRank, plan: Callable[..., None]) -> None:
    plan(rank=1)
    start_rank()
    assert type(everstep.join()) is Run
