"""FSDP2: shards are saved and restored bit for bit."""

from __future__ import annotations

import math
import shutil
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest

from everstep.rank import environment

SMALL = ["--dim", "16", "--heads", "2", "--layers", "2", "--seq", "16", "--batch", "12", "--steps", "8"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("dp", "fault"), [pytest.param(2, "kill-rank", marks=pytest.mark.wide), (3, "kill-during-save")]
)
def test_a_killed_and_resumed_job_has_the_losses_of_an_undisturbed_job(make_job: Any, dp: int, fault: str) -> None:
    undisturbed = make_job("fsdp2.py", SMALL, dp=dp)
    assert set(undisturbed.launch()) == {0}
    assert len(set(undisturbed.losses.values())) == 8  # a loss is the mean over all ranks, so a step has one value
    job = make_job("fsdp2.py", SMALL, dp=dp)
    job.inject(fault=fault, rank=1, at_step=5)
    assert job.launch()[1] == -signal.SIGKILL
    agreed = job.agreed_step()
    assert agreed in {4, 5}
    job.losses.clear()
    assert set(job.launch(resume=agreed)) == {0}
    assert job.losses == {at: loss for at, loss in undisturbed.losses.items() if at[1] >= agreed}


@pytest.mark.timeout(300)
def test_shards_of_replicas_are_restored_bit_for_bit(make_job: Any) -> None:
    """With hybrid sharding there are two replicas of two shards each."""
    given = {"dp": 4, "mesh": "dp_replicate=2,dp_shard=2"}
    undisturbed = make_job("fsdp2.py", [*SMALL, "--replicas", "2"], **given)
    assert set(undisturbed.launch()) == {0}
    job = make_job("fsdp2.py", [*SMALL, "--replicas", "2"], **given)
    job.inject(fault="kill-rank", rank=2, at_step=5)
    assert job.launch()[2] == -signal.SIGKILL
    agreed = job.agreed_step()
    job.losses.clear()
    assert set(job.launch(resume=agreed)) == {0}
    assert job.losses == {at: loss for at, loss in undisturbed.losses.items() if at[1] >= agreed}


def losses(job: Any) -> dict[int, float]:
    return {step: float.fromhex(loss) for (rank, step), loss in job.losses.items() if rank == 0}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("old", "new"), [(4, 2), pytest.param(2, 4, marks=pytest.mark.wide)])
def test_a_job_with_other_sizes_continues_from_disk(make_job: Any, old: int, new: int) -> None:
    """Without dropout, a step depends only on the weights and the batch. Both are the same for any number of ranks."""
    options = [*SMALL, "--dropout", "0"]
    undisturbed = make_job("fsdp2.py", options, dp=old)
    assert set(undisturbed.launch()) == {0}
    job = make_job("fsdp2.py", options, dp=new)
    job.extra[environment.RESHARD_FROM] = str(undisturbed.to_disk(6))
    job.inject(fault="kill-rank", rank=1, at_step=7)
    assert job.launch(resume=6)[1] == -signal.SIGKILL
    assert job.agreed_step() == 7  # later incidents use the new job's own slots
    assert set(job.launch(resume=7)) == {0}
    assert losses(job).keys() == {6, 7}
    for step, loss in losses(job).items():
        assert math.isclose(losses(undisturbed)[step], loss, rel_tol=1e-5), f"step {step}"

    again = make_job("fsdp2.py", options, dp=new)
    again.extra = job.extra
    assert set(again.launch()) == {0}  # without a resume step it also starts from this checkpoint
    assert losses(again) == losses(job)


@pytest.mark.timeout(300)
def test_a_checkpoint_on_disk_is_read_without_everstep(make_job: Any, tmp_path: Path) -> None:
    """The checkpoint is read as docs/concepts/checkpoints.md describes."""
    job = make_job("fsdp2.py", SMALL, dp=3)
    assert set(job.launch()) == {0}
    folder = tmp_path / "step"
    shutil.copytree(job.to_disk(8), folder)

    import torch
    from safetensors.torch import load_file
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    state: dict[str, Any] = {
        "model": {"head.weight": torch.empty(256, 16)},
        "optimizer": {"state": {0: {"exp_avg": torch.empty(16, 16)}}},
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        load(state, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)

    shards = [load_file(folder / f"rank-{rank}.safetensors") for rank in range(3)]
    assert torch.equal(state["model"]["head.weight"], torch.cat([shard["model.head.weight"] for shard in shards]))
    first = torch.cat([shard["optimizer.state.0.exp_avg"] for shard in shards])
    assert torch.equal(state["optimizer"]["state"][0]["exp_avg"], first)
    assert shards[0]["everstep.rng.torch"].dtype == torch.uint8
    assert [int(shard.get(f"rank-{rank}.optimizer.state.0.step", 8)) for rank, shard in enumerate(shards)] == [8, 8, 8]
