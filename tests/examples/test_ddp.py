"""DDP with dropout, BatchNorm, a schedule and a shuffling sampler resumes bit for bit."""

from __future__ import annotations

import signal
from typing import Any

import pytest

SMALL = ["--dim", "16", "--context", "8", "--batch", "8", "--steps", "9"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("dp", "accumulate"), [(2, 1), pytest.param(3, 1, marks=pytest.mark.wide), (2, 4)])
def test_a_killed_and_resumed_job_has_the_losses_of_an_undisturbed_job(make_job: Any, dp: int, accumulate: int) -> None:
    options = [*SMALL, "--accumulate", str(accumulate)]
    undisturbed = make_job("ddp.py", options, dp=dp)
    assert set(undisturbed.launch()) == {0}
    assert len(set(undisturbed.losses.values())) == 9  # a loss is the mean over all ranks, so a step has one value
    job = make_job("ddp.py", options, dp=dp)
    job.inject(fault="kill-rank", rank=1, at_step=5)
    assert job.launch()[1] == -signal.SIGKILL
    agreed = job.agreed_step()
    # The fault comes before the optimizer's hook waits for the save of step 5, so that save may be incomplete.
    assert agreed in {4, 5}
    job.losses.clear()
    assert set(job.launch(resume=agreed)) == {0}
    assert job.losses == {at: loss for at, loss in undisturbed.losses.items() if at[1] >= agreed}
