"""Hugging Face's ``Trainer``: one line, and it goes on after a fault as if nothing had been.

trainer = Trainer(model=…, args=…, train_dataset=…) everstep.integrations.huggingface.attach(trainer) trainer.train()
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback
from transformers.trainer import TRAINER_STATE_NAME

import everstep
from everstep.errors import ConfigError
from everstep.integrations.loop import DrivenLoop
from everstep.training.checkpoint import Stateful
from everstep.training.run import Run

KEPT = ("epoch", "total_flos", "num_input_tokens_seen", "best_metric", "best_global_step", "best_model_checkpoint")
"""Fields of the trainer's state. Its log, which grows with the job and would be copied at every step, is left out."""
PLACE = ("train_batch_size", "logging_steps", "eval_steps", "save_steps")
"""Fields of the arguments, which the trainer compares with those of its checkpoint."""
MEANS = ("_tr_loss", "_total_loss_scalar", "_globalstep_last_logged")
"""Fields of the trainer, for the mean loss that it logs."""
LOADS = ("_load_from_checkpoint", "_load_optimizer_and_scheduler", "_load_scaler", "_load_rng_state")
"""Methods by which the trainer loads its own checkpoints, in transformers 4 and 5."""


def attach(trainer: Trainer, run: Run | None = None, **things: Stateful) -> Run:
    """Have a trainer report its steps, save after each of them, and go on where the job stood.

    Model, optimizer, scheduler, scaler, random states and the position in the data are kept. Loss, gradient norm and
    tokens of this rank are reported, the loss as this rank computes it. Outside everstep the trainer trains as ever.

    Args:
        trainer: The trainer, before ``train`` is called.
        run: From ``everstep.join``; None: joined here, with the job's sizes.
        things: More objects of the state, as for ``run.checkpoint``.

    Raises:
        ConfigError: the trainer uses DeepSpeed, whose state is its own.
    """
    run = everstep.join() if run is None else run
    if not run.active:
        return run
    if getattr(trainer, "is_deepspeed_enabled", False):
        raise ConfigError("attach(trainer): DeepSpeed keeps parameters and optimizer state in a way of its own")
    follower = _Follower(trainer, DrivenLoop(run), things)
    trainer.add_callback(follower)
    follower.take_over()
    return run


class _Means:
    """The state of the trainer beside model, optimizer and scheduler."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        state = {name: getattr(trainer.state, name) for name in KEPT if hasattr(trainer.state, name)}
        means = {name: getattr(trainer, name) for name in MEANS if hasattr(trainer, name)}
        return {"state": state, "means": {name: _plain(value) for name, value in means.items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for name, value in state_dict["state"].items():
            setattr(self._trainer.state, name, value)
        for name, value in state_dict["means"].items():
            now = getattr(self._trainer, name, None)
            setattr(self._trainer, name, value.to(now.device) if isinstance(now, torch.Tensor) else value)


def _plain(value: Any) -> Any:
    """A tensor that the trainer adds to in place must not change under the save."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


class _Follower(TrainerCallback):  # type: ignore[misc]  # the library is not there where types are checked
    """Goes along with the trainer's loop."""

    def __init__(self, trainer: Trainer, loop: DrivenLoop, things: dict[str, Stateful]) -> None:
        self._trainer, self._loop, self._things = trainer, loop, things
        self._loss: Any = None
        """Sum over the micro-batches of a step, as they add up to its loss."""
        self._grad_norm: Any = None
        self._tokens = 0

    def take_over(self) -> None:
        """Stand between the trainer and what it loads, computes and clips."""
        trainer = self._trainer
        train, training_step = trainer.train, trainer.training_step
        clip = trainer.accelerator.clip_grad_norm_
        loads = {name: getattr(trainer, name) for name in LOADS if hasattr(trainer, name)}

        def trained(resume_from_checkpoint: Any = None, *args: Any, **options: Any) -> Any:
            with tempfile.TemporaryDirectory(prefix="everstep-") as folder:
                if self._loop.agreed > 0:
                    # All that the trainer needs to find its place in the data.
                    place = {name: getattr(trainer.args, name) for name in PLACE}
                    place |= {"global_step": self._loop.agreed, "epoch": 0.0}
                    (Path(folder) / TRAINER_STATE_NAME).write_text(json.dumps(place))
                    resume_from_checkpoint = folder
                    for name in loads:
                        setattr(trainer, name, lambda *_, **__: None)
                try:
                    return train(resume_from_checkpoint, *args, **options)
                finally:
                    self._loop.leave()
                    for name, load in loads.items():
                        setattr(trainer, name, load)

        def computed(model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
            loss = training_step(model, inputs, *args, **options)
            self._loss = loss.detach() if self._loss is None else self._loss + loss.detach()
            ids = inputs.get("input_ids") if hasattr(inputs, "get") else None
            self._tokens += ids.numel() if isinstance(ids, torch.Tensor) else 0
            return loss

        def clipped(*args: Any, **options: Any) -> Any:
            self._grad_norm = clip(*args, **options)
            return self._grad_norm

        trainer.train, trainer.training_step, trainer.accelerator.clip_grad_norm_ = trained, computed, clipped

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Model, optimizer and scheduler are made: restore them."""
        trainer = self._trainer
        state.compute_steps(args, state.max_steps)  # what the arguments give as a share of all steps
        scaler = getattr(trainer.accelerator, "scaler", None)
        known: dict[str, Any] = {
            "model": trainer.model,
            # Accelerate's wrapper would hide which parameters the optimizer trains.
            "optimizer": getattr(trainer.optimizer, "optimizer", trainer.optimizer),
            "scheduler": trainer.lr_scheduler,
            "trainer": _Means(trainer),
        }
        more = {} if scaler is None else {"scaler": scaler}
        self._loop.begin(state.max_steps, state.global_step, **known, **more, **self._things)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The step before is complete."""
        self._loop.step_begins(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The optimizer has stepped: report it."""
        if self._loop.step is not None:
            self._loop.run.report(
                self._loop.step, loss=self._loss, grad_norm=_whole(self._grad_norm), tokens=self._tokens
            )
        self._loss, self._grad_norm, self._tokens = None, None, 0

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The last step is complete."""
        self._loop.end()


def _whole(norm: Any) -> Any:
    """A gradient norm that every rank has as a whole; None: it would take all ranks to know it."""
    return None if hasattr(norm, "placements") and any(p.is_partial() for p in norm.placements) else norm
