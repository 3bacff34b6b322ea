"""A Lightning training as a user would write it, on 2 machines with 2 ranks each. A drill runs it."""

from __future__ import annotations

import time
from typing import Any

import lightning.pytorch as lightning
import torch
from torch.utils.data import DataLoader

from everstep.integrations.lightning import attach


class Small(lightning.LightningModule):  # type: ignore[misc]  # type checks run without this library
    """A model with dropout, so its result depends on random states."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Dropout(0.5), torch.nn.Linear(32, 1))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        """Return the loss of a batch. It takes long enough that a drill's fault occurs during a step."""
        time.sleep(0.05)
        loss: torch.Tensor = self.layers(batch).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        """Return AdamW over all parameters."""
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    def train_dataloader(self) -> Any:
        """Return 16 shuffled batches for each rank."""
        rows = torch.randn(256, 16, generator=torch.Generator().manual_seed(2))
        return DataLoader(rows, batch_size=4, shuffle=True)  # type: ignore[arg-type]


if __name__ == "__main__":
    lightning.seed_everything(7)
    machines: dict[str, Any] = {"accelerator": "cpu", "strategy": "ddp", "devices": 2, "num_nodes": 2}
    quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(max_epochs=2, logger=False, **machines, **quiet)
    attach(trainer)
    trainer.fit(Small())
