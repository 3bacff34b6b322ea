"""Connects Hugging Face's ``Trainer`` to everstep, so that after a fault it resumes where the job was.

::

    trainer = Trainer(model=…, args=…, train_dataset=…)
    everstep.integrations.huggingface.attach(trainer)
    trainer.train()
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
"""Saved fields of the trainer's state. The log is left out, since it grows with the job and each save would copy it."""
COMPARED = ("train_batch_size", "logging_steps", "eval_steps", "save_steps")
"""Fields of the arguments that the trainer compares with the fields of its checkpoint."""
MEANS = ("_tr_loss", "_total_loss_scalar", "_globalstep_last_logged")
"""Saved fields of the trainer from which it computes the mean loss that it logs."""
LOADS = ("_load_from_checkpoint", "_load_optimizer_and_scheduler", "_load_scaler", "_load_rng_state")
"""Methods by which the trainer loads its own checkpoints, in transformers 4 and 5."""


def attach(trainer: Trainer, run: Run | None = None, **things: Stateful) -> Run:
    """Let a trainer report its steps, save its state after each step, and resume from the job's last state.

    The state is model, optimizer, scheduler, scaler, random states and the position in the data. The trainer reports
    the tokens, the gradient norm and the loss that this rank computes. Outside everstep nothing changes.

    Args:
        trainer: The trainer, before ``train`` is called.
        run: The run from ``everstep.join``; None: the job is joined here, with its sizes.
        things: More objects of the state, as for ``run.checkpoint``.

    Raises:
        ConfigError: the trainer uses DeepSpeed, which is not supported.
    """
    run = everstep.join() if run is None else run
    if not run.active:
        return run
    if getattr(trainer, "is_deepspeed_enabled", False):
        raise ConfigError("attach(trainer): DeepSpeed is not supported, since it keeps parameters and optimizer itself")
    callback = _TrainerCallback(trainer, DrivenLoop(run), things)
    trainer.add_callback(callback)
    callback.wrap_trainer()
    return run


class _TrainerState:
    """The state of the trainer itself, without model, optimizer and scheduler."""

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
            current = getattr(self._trainer, name, None)
            setattr(self._trainer, name, value.to(current.device) if isinstance(current, torch.Tensor) else value)


def _plain(value: Any) -> Any:
    """A copy of a tensor, since the trainer changes its tensor in place while a save copies; another value itself."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


class _TrainerCallback(TrainerCallback):  # type: ignore[misc]  # types are checked without the library
    """Drives the run's steps from the trainer's loop."""

    def __init__(self, trainer: Trainer, loop: DrivenLoop, things: dict[str, Stateful]) -> None:
        self._trainer, self._loop, self._things = trainer, loop, things
        self._loss: Any = None
        """Sum of the losses of the current step's micro-batches, which is the loss of the step."""
        self._grad_norm: Any = None
        self._tokens = 0

    def wrap_trainer(self) -> None:
        """Wrap the methods by which the trainer trains, computes a loss, clips gradients and loads checkpoints."""
        trainer = self._trainer
        train, training_step = trainer.train, trainer.training_step
        clip = trainer.accelerator.clip_grad_norm_
        loads = {name: getattr(trainer, name) for name in LOADS if hasattr(trainer, name)}

        def trained(resume_from_checkpoint: Any = None, *args: Any, **options: Any) -> Any:
            with tempfile.TemporaryDirectory(prefix="everstep-") as folder:
                if self._loop.agreed > 0:
                    # From this file the trainer reads its position in the data.
                    position = {name: getattr(trainer.args, name) for name in COMPARED}
                    position |= {"global_step": self._loop.agreed, "epoch": 0.0}
                    (Path(folder) / TRAINER_STATE_NAME).write_text(json.dumps(position))
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
        """Restore model, optimizer and scheduler, which exist now."""
        trainer = self._trainer
        state.compute_steps(args, state.max_steps)  # some arguments are shares of the number of steps
        scaler = getattr(trainer.accelerator, "scaler", None)
        things: dict[str, Any] = {
            "model": trainer.model,
            # Accelerate's wrapper would hide which parameters the optimizer trains.
            "optimizer": getattr(trainer.optimizer, "optimizer", trainer.optimizer),
            "scheduler": trainer.lr_scheduler,
            "trainer": _TrainerState(trainer),
        }
        if scaler is not None:
            things["scaler"] = scaler
        self._loop.begin(state.max_steps, state.global_step, **things, **self._things)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Complete the previous step."""
        self._loop.step_begins(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Report the step, since the optimizer has stepped."""
        if self._loop.step is not None:
            self._loop.run.report(
                self._loop.step, loss=self._loss, grad_norm=_reduced(self._grad_norm), tokens=self._tokens
            )
        self._loss, self._grad_norm, self._tokens = None, None, 0

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Complete the last step."""
        self._loop.end()


def _reduced(norm: Any) -> Any:
    """A gradient norm if this rank has its value; None: it is a DTensor of partial sums, which only all ranks can
    add."""
    return None if hasattr(norm, "placements") and any(p.is_partial() for p in norm.placements) else norm
