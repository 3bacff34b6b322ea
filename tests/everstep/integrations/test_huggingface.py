"""Hugging Face's Trainer resumes bit for bit. ``make integrations`` runs this test with the library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.everstep.integrations.driven import Crash, Job

transformers = pytest.importorskip("transformers", reason="make integrations runs it")
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.usefixtures("outside")]


def trainer(folder: Path, losses: dict[int, float], crash_at: int = -1, **options: Any) -> Any:
    """Return a trainer of a tiny GPT with dropout, for 2 epochs of 10 batches in random order."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

    class Watch(TrainerCallback):  # type: ignore[misc]
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == crash_at:
                raise Crash

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if logs and "loss" in logs:
                losses[state.global_step] = logs["loss"]

    torch.manual_seed(1)
    sizes = {"vocab_size": 32, "n_positions": 8, "n_embd": 16, "n_layer": 1, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    rows = torch.randint(32, (40, 8), generator=torch.Generator().manual_seed(2))
    given = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "num_train_epochs": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 3,
    }
    arguments = TrainingArguments(**(given | options))
    data = [{"input_ids": row, "labels": row} for row in rows]
    return Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data[:8], callbacks=[Watch()])


@pytest.mark.parametrize(
    ("crash_at", "options"),
    [
        (4, {}),
        (13, {}),
        (10, {}),  # it crashes at the first step of an epoch
        (3, {"gradient_accumulation_steps": 2, "logging_steps": 3}),
        (6, {"eval_strategy": "steps", "eval_steps": 6}),
    ],
)
def test_it_goes_on_bit_for_bit_where_it_stood(
    job: Job, tmp_path: Path, crash_at: int, options: dict[str, Any]
) -> None:
    from everstep.integrations.huggingface import attach

    def make(losses: dict[int, float], crash: int = -1) -> Any:
        return trainer(tmp_path, losses, crash, **options)

    undisturbed: dict[int, float] = {}
    alone = make(undisturbed)
    assert not attach(alone).active
    alone.train()

    losses: dict[int, float] = {}
    job.start(1)
    broken = make(losses, crash_at)
    attach(broken)
    with pytest.raises(Crash):
        broken.train()
    assert job.completed == crash_at

    job.start(2, resume=crash_at)
    resumed = make(losses)
    attach(resumed)
    result = resumed.train()

    assert losses == undisturbed
    assert result.global_step == alone.state.global_step == job.completed
    ends = zip(resumed.model.state_dict().values(), alone.model.state_dict().values(), strict=True)
    assert all(torch.equal(*pair) for pair in ends)
    assert [record.step for record in job.records] == list(range(crash_at, result.global_step))
    assert all(record.given == 3 and record.tokens > 0 and record.grad_norm > 0 for record in job.records)
    assert job.finished


def test_a_nan_is_reported_though_the_trainer_hides_it(job: Job, tmp_path: Path) -> None:
    """With ``logging_nan_inf_filter``, the trainer logs a mean of earlier losses in place of the NaN."""
    from everstep.integrations.huggingface import attach

    job.start(1)
    made = trainer(tmp_path, {}, max_steps=2)
    attach(made)
    with torch.no_grad():
        made.model.transformer.wte.weight.fill_(torch.nan)
    made.train()
    assert all(record.given == 3 and record.loss != record.loss for record in job.records)
