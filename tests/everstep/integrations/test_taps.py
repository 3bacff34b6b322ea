"""Values that a script logs with wandb and TensorBoard are reported. ``make integrations`` has both libraries."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import everstep
from everstep.errors import ConfigError
from everstep.integrations.logged import GRAD_NORM, LOSS, Tap
from tests.everstep.integrations.driven import Job

pytestmark = pytest.mark.usefixtures("outside")


def reported(job: Job) -> list[tuple[int, float, float, int]]:
    return [(record.step, record.loss, record.grad_norm, record.given) for record in job.records]


def test_values_of_a_step_that_are_logged_one_by_one_are_one_report(job: Job) -> None:
    job.start(1)
    tap = Tap(everstep.join(), LOSS, GRAD_NORM)
    for step in range(2):
        tap.record({"Train/Loss": torch.tensor(step + 1.0), "lr": 0.1}, step)
        tap.record({"grad_norm": 0.5, "histogram": [1, 2, 3]}, step)
    assert reported(job) == [(0, 1.0, 0.5, 3)], "step 1 is not reported yet, since more of its values may follow"
    tap.close()
    assert reported(job) == [(0, 1.0, 0.5, 3), (1, 2.0, 0.5, 3)]


def test_within_a_loop_of_ours_its_number_counts_and_else_they_are_counted(job: Job) -> None:
    """In a loop of ``run.steps``, the loop's step counts. Without a loop and a step, values are counted."""
    job.start(1)
    run = everstep.join()
    tap = Tap(run, LOSS, GRAD_NORM)
    for _ in run.steps(2):
        tap.record({"loss": 1.0}, 4711)
    for _ in range(2):
        tap.record({"loss": 2.0}, None)
    tap.close()
    assert [record.step for record in job.records] == [0, 1, 2, 3]


def test_who_reports_by_himself_is_not_told_twice(job: Job) -> None:
    """A script that calls ``run.report`` itself is not reported a second time."""
    job.start(1)
    run = everstep.join()
    tap = Tap(run, LOSS, GRAD_NORM)
    for step in range(3):
        run.report(step, loss=1.0)
        tap.record({"loss": 9.0}, step)
    tap.close()
    assert [record.loss for record in job.records] == [1.0, 1.0, 1.0]


def test_a_nan_is_reported_as_one_and_what_is_no_number_is_not(job: Job) -> None:
    job.start(1)
    tap = Tap(everstep.join(), ["ce"], [])
    tap.record({"ce": math.nan, "loss": 1.0}, 0)
    tap.record({"ce": "a picture"}, 1)
    tap.record({"ce": torch.ones(3)}, 2)
    tap.close()
    assert [(record.step, record.given, math.isnan(record.loss)) for record in job.records] == [(0, 1, True)]
    with pytest.raises(ConfigError, match="lists of names"):
        Tap(everstep.join(), "loss", [])


def test_outside_everstep_nothing_happens() -> None:
    tap = Tap(everstep.join(), LOSS, GRAD_NORM)
    tap.record({"loss": 1.0}, 0)
    tap.close()


@pytest.mark.filterwarnings("default")
def test_wandb(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb", reason="make integrations runs it")
    from everstep.integrations.wandb import tap

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    job.start(1)
    original = wandb.sdk.wandb_run.Run.log
    tapped = tap()
    with wandb.init(project="p", dir=str(tmp_path)) as logging:
        wandb.log({"train/loss": 2.0, "train/grad_norm": 0.5})
        logging.log({"train/loss": 1.5}, step=7, commit=True)
        kept: Any = dict(logging.summary)
    tapped.close()
    assert reported(job)[0] == (0, 2.0, 0.5, 3) and reported(job)[1][:2] == (7, 1.5)
    assert kept["train/loss"] == 1.5, "wandb still gets the logged value"
    assert wandb.sdk.wandb_run.Run.log is original


@pytest.mark.filterwarnings("default")
def test_tensorboard(job: Job, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="make integrations runs it")
    from torch.utils.tensorboard import SummaryWriter

    from everstep.integrations.tensorboard import tap

    job.start(1)
    original = SummaryWriter.add_scalar
    tapped = tap()
    with SummaryWriter(str(tmp_path)) as writer:
        for step in range(2):
            writer.add_scalar("loss/train", 2.0 - step, step)
            writer.add_scalars("train", {"grad_norm": 0.5, "lr": 0.1}, step)
    tapped.close()
    assert reported(job) == [(0, 2.0, 0.5, 3), (1, 1.0, 0.5, 3)]
    assert list(tmp_path.rglob("events.out.*")), "the writer still writes its file"
    assert SummaryWriter.add_scalar is original
