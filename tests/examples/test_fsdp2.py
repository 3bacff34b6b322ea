"""FSDP2: shards are saved and restored bit for bit."""

from __future__ import annotations

import signal
from typing import Any

import pytest

SMALL = ["--dim", "16", "--heads", "2", "--layers", "2", "--seq", "16", "--batch", "12", "--steps", "8"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("dp", "fault"), [(2, "kill-rank"), (3, "kill-during-save")])
def test_killed_and_resumed_is_equal_to_undisturbed(make_job: Any, dp: int, fault: str) -> None:
    undisturbed = make_job("fsdp2.py", SMALL, dp=dp)
    assert set(undisturbed.launch()) == {0}
    assert len(set(undisturbed.losses.values())) == 8  # the mean of all ranks, step by step
    job = make_job("fsdp2.py", SMALL, dp=dp)
    job.inject(fault=fault, rank=1, at_step=5)
    assert job.launch()[1] == -signal.SIGKILL
    agreed = job.agreed_step()
    assert agreed in {4, 5}
    job.losses.clear()
    assert set(job.launch(resume=agreed)) == {0}
    assert job.losses == {at: loss for at, loss in undisturbed.losses.items() if at[1] >= agreed}
