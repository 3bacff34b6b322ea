"""What docs/concepts/bit-for-bit.md says about data that is kept from one body to the next.

After a kill, new processes resume this data bit for bit, or there is a warning or an error.
"""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
SCRIPT = str(HERE / "across_bodies.py")
STEPS = 16
ALONE = [
    "accumulate_zero_last",
    "accumulate_zero_first",
    "accumulate_zeros_last",
    "accumulate_zeros_first",
    "accumulate_for_ever",
    "zero_first",
    "never_zero",
    "two_optimizers",
    "frozen_later",
    "own_gradients",
    "in_backward",
    "scaler",
    "scaler_zero_first",
    "schedule_per_epoch",
    "average",
    "randomness",
    "lazy",
    "lbfgs",
    "compiled",
    "workers",
]
TOGETHER = ["ddp_no_sync", "ddp_no_sync_bucket_view", "ddp_no_sync_bucket_view_zero_first", "fsdp_accumulate"]


def undisturbed_and_killed(make_job: Any, name: str, dp: int, at_step: int) -> tuple[Any, Any]:
    """Return the losses of a run without a fault, and of a run that was killed within a window and continued."""
    undisturbed = make_job(SCRIPT, [name], dp=dp)
    assert set(undisturbed.launch()) == {0}
    assert len(undisturbed.losses) == STEPS * dp
    assert len(set(undisturbed.losses.values())) > STEPS // 2
    job = make_job(SCRIPT, [name], dp=dp)
    job.inject(fault="kill-rank", rank=dp - 1, at_step=at_step)
    assert job.launch()[-1] == -signal.SIGKILL
    agreed = job.agreed_step()
    assert agreed in {at_step - 1, at_step}
    job.losses = {at: loss for at, loss in job.losses.items() if at[1] < agreed}
    assert set(job.launch(resume=agreed)) == {0}
    return undisturbed.losses, job.losses


@pytest.mark.parametrize(
    ("name", "at_step"), [*((name, 10) for name in ALONE), *((name, 6) for name in ("accumulate_zero_last", "scaler"))]
)
def test_it_resumes_bit_for_bit(make_job: Any, name: str, at_step: int) -> None:
    undisturbed, killed = undisturbed_and_killed(make_job, name, 1, at_step)
    assert killed == undisturbed


def test_gradients_that_are_used_again_are_missed_before_the_wrong_step(make_job: Any, tmp_path: Path) -> None:
    """A parameter keeps a used gradient, which is not touched until the next step uses it again."""
    job = make_job(SCRIPT, ["accumulate_with_decay"])
    job.extra["ACROSS_BODIES_LOG"] = str(tmp_path / "log")
    assert job.launch() == [0]
    assert "warned: everstep: gradients that optimizer.step() had used were not dropped" in said(tmp_path)
    job.inject(
        fault="kill-rank", rank=0, at_step=6
    )  # this is before the optimizer's second step, in which the use would be noticed
    assert job.launch() == [-signal.SIGKILL]
    assert job.launch(resume=job.agreed_step()) == [1]
    assert "lacks gradients that the script uses again" in said(tmp_path)


def said(folder: Path) -> str:
    """Return the warnings of rank 0, and the error with which it ended."""
    return (folder / "log-0").read_text()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", TOGETHER)
def test_two_ranks_resume_bit_for_bit(make_job: Any, name: str) -> None:
    undisturbed, killed = undisturbed_and_killed(make_job, name, 2, 10)
    assert killed == undisturbed


def test_parameters_added_in_a_body_are_warned_of_when_they_are(make_job: Any, tmp_path: Path) -> None:
    job = make_job(SCRIPT, ["groups_added"])
    job.extra["ACROSS_BODIES_LOG"] = str(tmp_path / "log")
    job.inject(fault="kill-rank", rank=0, at_step=6)
    assert job.launch() == [-signal.SIGKILL]
    assert said(tmp_path).count("'optimizer' has other parameters than when the loop began") == 1
    assert job.launch(resume=job.agreed_step()) == [1]
    assert "the saved state of 'optimizer' does not fit" in said(tmp_path)


@pytest.mark.timeout(300)
def test_a_bucket_s_views_are_seen_to_be_dropped(make_job: Any, tmp_path: Path) -> None:
    """The views are the same tensors in each step."""
    job = make_job(SCRIPT, ["ddp_bucket_view_zero_first"], dp=2)
    job.extra["ACROSS_BODIES_LOG"] = str(tmp_path / "log")
    assert job.launch() == [0, 0]
    assert said(tmp_path) == ""


@pytest.mark.timeout(300)
def test_gradients_that_fsdp_has_not_reduced_are_refused_at_once(make_job: Any, tmp_path: Path) -> None:
    job = make_job(SCRIPT, ["fsdp_without_sync"], dp=2)
    job.extra["ACROSS_BODIES_LOG"] = str(tmp_path / "log")
    assert 1 in job.launch()
    assert job.agreed_step() == 0
    assert "FSDP2 has not reduced" in said(tmp_path)
    assert "Let each body of run.steps() be a complete optimizer step" in said(tmp_path)


def test_each_row_of_the_table_is_held_by_a_test() -> None:
    text = (HERE.parents[1] / "docs" / "concepts" / "bit-for-bit.md").read_text()
    _, _, section = text.partition("## What lives from one body to the next\n")
    rows = [line for line in section.partition("\n## ")[0].splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 20
    tests = Path(__file__).read_text()
    named = {name for row in rows for name in re.findall(r"`([^`]+)`", row.rsplit("|", 2)[1])}
    assert all(len(re.findall(r"`", row.rsplit("|", 2)[1])) >= 2 for row in rows)
    assert [name for name in named if f'"{name}"' not in tests and not (HERE.parents[1] / name).is_file()] == []
    assert {*ALONE, *TOGETHER} - named == set()
