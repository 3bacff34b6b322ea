"""Lightning's Trainer resumes bit for bit. ``make integrations`` runs these tests with the library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.everstep.integrations.driven import Crash, Job

lightning = pytest.importorskip("lightning.pytorch", reason="make integrations runs it")
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.usefixtures("outside")]

Losses = dict[int, float]


def training(losses: Losses, crash_at: int = -1, *, manual: bool = False, **options: Any) -> tuple[Any, Any]:
    """Return a trainer and a tiny model with dropout, for 2 epochs of 10 batches in random order."""

    class Tiny(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = not manual
            self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.layers(batch).square().mean()
            if manual:
                optimizer = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(loss)
                self.crash()
                optimizer.step()
            self.log("grad_norm", loss * 2)
            losses[self.global_step, batch_idx] = loss.item()  # type: ignore[index]
            return loss

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.crash()

        def crash(self) -> None:
            if self.global_step == crash_at:
                raise Crash

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("val_loss", self.layers(batch).mean())

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

        def train_dataloader(self) -> Any:
            rows = torch.randn(40, 4, generator=torch.Generator().manual_seed(2))
            return DataLoader(rows, batch_size=4, shuffle=True)  # type: ignore[arg-type]

        def val_dataloader(self) -> Any:
            return DataLoader(torch.ones(4, 4), batch_size=2)  # type: ignore[arg-type]

    torch.manual_seed(1)
    given: dict[str, Any] = {"max_epochs": 2, "accelerator": "cpu", "devices": 1, "logger": False}
    quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    return lightning.Trainer(**(given | quiet | options)), Tiny()


@pytest.mark.parametrize(
    ("crash_at", "options"),
    [
        (4, {}),
        (13, {}),
        (10, {}),  # the first step of the second epoch
        (0, {}),
        (3, {"accumulate_grad_batches": 2}),
        (6, {"val_check_interval": 3, "limit_val_batches": 1}),
        (13, {"max_steps": 17, "max_epochs": -1}),
        (13, {"manual": True}),
    ],
)
def test_training_resumes_bit_for_bit_after_a_crash(job: Job, crash_at: int, options: dict[str, Any]) -> None:
    from everstep.integrations.lightning import attach

    undisturbed: Losses = {}
    alone, model = training(undisturbed, **options)
    assert not attach(alone).active
    alone.fit(model)

    job.start(1)
    full, untouched = training({}, **options)
    attach(full)
    full.fit(untouched)

    losses: Losses = {}
    job.start(2)
    broken, module = training(losses, crash_at, **options)
    attach(broken)
    with pytest.raises(Crash):
        broken.fit(module)
    assert job.completed == crash_at

    job.start(3, resume=crash_at)
    resumed, again = training(losses, **options)
    attach(resumed)
    resumed.fit(again)

    assert losses == undisturbed
    assert resumed.global_step == alone.global_step == job.completed
    place, whole = (made.callbacks[-1]._position.state_dict() for made in (resumed, full))
    assert place["loops"] == whole["loops"] and place["epoch"] == whole["epoch"]
    ends = zip(again.state_dict().values(), model.state_dict().values(), strict=True)
    assert all(torch.equal(*pair) for pair in ends)
    assert [record.step for record in job.records] == list(range(crash_at, resumed.global_step))
    assert all(record.loss > 0 and record.grad_norm > 0 for record in job.records)


def test_a_resumed_job_without_steps_left_ends_at_once(job: Job) -> None:
    from everstep.integrations.lightning import attach

    losses: Losses = {}
    job.start(1)
    trainer, module = training(losses)
    attach(trainer)
    trainer.fit(module)
    assert job.finished

    losses.clear()
    job.start(2, resume=20)
    trainer, module = training(losses)
    attach(trainer)
    trainer.fit(module)
    assert not losses and job.finished


def test_a_nan_is_reported(job: Job) -> None:
    from everstep.integrations.lightning import attach

    job.start(1)
    trainer, module = training({}, max_steps=2)
    attach(trainer)
    with torch.no_grad():
        module.layers[0].weight.fill_(torch.nan)
    trainer.fit(module)
    assert len(job.records) == 2 and all(record.loss != record.loss for record in job.records)


def test_a_strategy_with_its_own_sharding_is_refused(job: Job, tmp_path: Path) -> None:
    from everstep.errors import ConfigError
    from everstep.integrations.lightning import SHARDING, attach

    job.start(1)
    trainer, _ = training({})

    class FSDPStrategy(type(trainer.strategy)):  # type: ignore[misc]
        pass

    assert FSDPStrategy.__name__ in SHARDING
    trainer.strategy.__class__ = FSDPStrategy
    with pytest.raises(ConfigError, match="FSDPStrategy"):
        attach(trainer)


@pytest.mark.timeout(180)
async def test_ddp_over_two_machines_resumes_bit_for_bit_after_a_rank_is_killed() -> None:
    from drills.runner import run_drill
    from drills.spec.request import DrillRequest

    sizes = {"machines": 2, "ranks_per_machine": 2, "tp": 1, "pp": 1, "standbys": 0}
    script = [str(Path(__file__).with_name("lightning_script.py"))]
    result = await run_drill(
        DrillRequest.model_validate({"fault": "kill-rank", "ranks": [1], "script": script, **sizes})
    )
    assert result.problems == []
    assert result.ok and result.losses_match and result.state_match
