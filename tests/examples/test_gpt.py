"""The example is deterministic everywhere, and resumes bit for bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SMALL = ["--dim", "32", "--seq", "16", "--steps", "8", "--batch", "4"]


def run_script(command: list[str], losses: Path, *options: str) -> list[float]:
    """Return the losses of a run outside everstep."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("EVERSTEP_")}
    environment.update(OMP_NUM_THREADS="1", TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    arguments = [str(ROOT / "examples" / "gpt.py"), *SMALL, "--losses", str(losses), *options]
    done = subprocess.run(
        [*command, *arguments], env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr[-3000:]
    records = [json.loads(line) for line in losses.read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(8))
    return [record["loss"] for record in records]


def test_plain_python_repeats_itself_and_learns(tmp_path: Path) -> None:
    first = run_script([sys.executable], tmp_path / "a")
    assert run_script([sys.executable], tmp_path / "b") == first
    assert first[-1] < first[0] - 0.5


@pytest.mark.timeout(300)
def test_killed_and_resumed_is_equal_to_torchrun_undisturbed(make_job: Any, tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    expected = run_script(torchrun, tmp_path / "a", "--pp", "2")
    job = make_job("gpt.py", SMALL, pp=2)
    job.inject(fault="kill-rank", rank=1, at_step=5)
    assert job.launch()[1] == -signal.SIGKILL
    agreed = job.agreed_step()
    assert agreed in {4, 5}  # the save after 5 steps overlapped the step in which the rank was killed
    assert job.launch(resume=agreed) == [0, 0]
    assert job.losses == {(rank, step): loss.hex() for rank in range(2) for step, loss in enumerate(expected)}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("sizes", [{"tp": 2}, {"dp": 2, "pp": 2}])
def test_killed_during_a_save_the_step_before_is_there(make_job: Any, sizes: dict[str, int]) -> None:
    undisturbed = make_job("gpt.py", SMALL, **sizes)
    assert set(undisturbed.launch()) == {0}
    job = make_job("gpt.py", SMALL, **sizes)
    job.inject(fault="kill-during-save", rank=1, at_step=5)
    assert job.launch()[1] == -signal.SIGKILL
    agreed = job.agreed_step()
    assert agreed in {
        4,
        5,
    }  # the kill interrupted the save after 6 steps; the other rank's last save may be that after 4
    assert set(job.launch(resume=agreed)) == {0}
    assert job.losses == undisturbed.losses


@pytest.mark.timeout(300)
def test_three_data_parallel_ranks_resume_bit_for_bit(make_job: Any) -> None:
    """With three or more ranks, the bits depend on DDP's buckets. So the warm-up has to make the buckets."""
    undisturbed = make_job("gpt.py", SMALL, dp=3)
    assert undisturbed.launch() == [0, 0, 0]
    job = make_job("gpt.py", SMALL, dp=3)
    job.inject(fault="raise", rank=2, at_step=4, exception="ValueError")
    assert job.launch()[2] == 1
    assert job.launch(resume=job.agreed_step()) == [0, 0, 0]
    assert job.losses == undisturbed.losses
    assert len(job.losses) == 24


def test_sizes_that_do_not_divide_are_named(tmp_path: Path) -> None:
    script = str(ROOT / "examples" / "gpt.py")
    done = subprocess.run([sys.executable, script, "--heads", "3"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "gpt.py: --dim 64 is not a multiple of --heads 3" in done.stderr
