"""Connects PyTorch Lightning's ``Trainer`` to everstep, so that after a fault it resumes where the job was.

::

    trainer = Trainer(max_epochs=…)
    everstep.integrations.lightning.attach(trainer)
    trainer.fit(model)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities import CombinedLoader

import everstep
from everstep.errors import ConfigError
from everstep.integrations.logged import GRAD_NORM, LOSS
from everstep.integrations.loop import DrivenLoop
from everstep.training.checkpoint import Stateful
from everstep.training.rng import RandomState
from everstep.training.run import Run

ENDLESS = 2**62
"""Number of steps of a training whose length Lightning does not know."""
TOTAL_NORM = ("grad_2.0_norm_total", *GRAD_NORM)
"""Names of the gradient norm. The first name is the one that Lightning's own ``grad_norm`` uses."""
SHARDING = ("DeepSpeedStrategy", "FSDPStrategy", "ModelParallelStrategy")
"""Strategies that shard the model or the optimizer state themselves. They are refused, since they were not tested."""


def attach(trainer: Trainer, run: Run | None = None, **things: Stateful) -> Run:
    """Let a trainer report its steps, save its state after each step, and resume from the job's last state.

    The state is module, optimizers, schedulers, scaler, random states and the position in the data. The trainer reports
    the loss of this rank, and the gradient norm if the module logs it. Outside everstep nothing changes.

    Args:
        trainer: The trainer, before ``fit`` is called. Call ``fit`` without ``ckpt_path``.
        run: The run from ``everstep.join``; None: the job is joined here, with its sizes.
        things: More objects of the state, as for ``run.checkpoint``.

    Raises:
        ConfigError: the trainer's strategy is one of ``SHARDING``.
    """
    run = everstep.join() if run is None else run
    if not run.active:
        return run
    strategy = type(trainer.strategy).__name__
    if strategy in SHARDING:
        raise ConfigError(f"attach(trainer): {strategy} shards the model or the optimizer itself: use DDP")
    callback = _LightningCallback(trainer, DrivenLoop(run), things)
    trainer.callbacks.append(callback)
    callback.wrap_trainer()
    return run


class _TrainerPosition:
    """The state of the trainer's loops."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.steps = 0
        """Number of completed steps of the optimizer."""
        self.batches = 0
        """Number of completed batches of the epoch."""
        self.random: dict[str, Any] = {}
        """Random states from which the epoch's order of the data was drawn."""
        self.restored = False
        """Whether the state was restored and its epoch was not entered yet."""
        self._counts: dict[str, Any] = {}
        """The restored state of the loops."""

    @property
    def _loops(self) -> dict[str, Any]:
        epoch = self._trainer.fit_loop.epoch_loop
        return {
            "batch": epoch.batch_progress,
            "scheduler": epoch.scheduler_progress,
            "optimizer": epoch.automatic_optimization.optim_progress,
            "manual": epoch.manual_optimization.optim_step_progress,
        }

    def state_dict(self) -> dict[str, Any]:
        return {
            "epoch": self._trainer.current_epoch,
            "batches": self.batches,
            "steps": self.steps,
            "stepped": self._trainer.fit_loop.epoch_loop._batches_that_stepped,
            "random": self.random,
            "loops": {name: loop.state_dict() for name, loop in self._loops.items()},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.steps, self.batches, self.random = (state_dict[name] for name in ("steps", "batches", "random"))
        self.restored = True
        fit = self._trainer.fit_loop
        for count in (fit.epoch_progress.total, fit.epoch_progress.current):
            for name in ("ready", "started", "processed", "completed"):
                setattr(count, name, state_dict["epoch"])
        fit.epoch_loop._batches_that_stepped = state_dict["stepped"]
        self._counts = state_dict["loops"]
        self._load_counts()

    def _load_counts(self) -> None:
        for name, loop in self._loops.items():
            loop.load_state_dict(self._counts[name])

    def enter(self) -> None:
        """Count the completed batches of the restored epoch as done; the trainer has reset the counts for a new
        epoch."""
        self._load_counts()
        progress = self._trainer.fit_loop.epoch_loop.batch_progress
        progress.total.ready = progress.total.started = progress.total.processed = progress.total.completed
        for name in ("ready", "started", "processed", "completed"):
            setattr(progress.current, name, self.batches)


class _LightningCallback(Callback):  # type: ignore[misc]  # types are checked without the library
    """Drives the run's steps from the trainer's loops."""

    def __init__(self, trainer: Trainer, loop: DrivenLoop, things: dict[str, Stateful]) -> None:
        self._loop, self._things = loop, things
        self._position = _TrainerPosition(trainer)
        self._random = RandomState()
        self._stepped = 0
        """The trainer's count of optimizer steps at the end of the last batch."""
        self._loss: Any = None
        """Sum of the losses of the current step's micro-batches, which is the loss of the step."""

    def wrap_trainer(self) -> None:
        """Wrap ``fit``, and the method in which the trainer makes the iterator of an epoch."""
        trainer, position = self._position._trainer, self._position
        epoch_loop = trainer.fit_loop.epoch_loop
        begin, fit = epoch_loop.on_run_start, trainer.fit

        def begun(data_fetcher: Any) -> None:
            skip = position.batches if position.restored else 0
            if position.restored:
                # Without loader processes, the order of the data is drawn with the first batch. With loader processes,
                # the order of the first epoch is drawn before anything can be restored. It is the same order if the
                # script sets the same seed.
                self._random.load_state_dict(position.random)
            else:
                position.random = self._random.state_dict()
            begin(data_fetcher)
            for _ in range(skip):
                next(data_fetcher)
            if position.restored:
                position.enter()
            position.restored = False

        def fitted(*args: Any, **options: Any) -> Any:
            try:
                return fit(*args, **options)
            finally:
                self._loop.leave()

        epoch_loop.on_run_start, trainer.fit = begun, fitted

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Restore the state. All its objects exist now, and the order of the first epoch has been drawn."""
        things: dict[str, Any] = {"module": pl_module, "trainer": self._position}
        things |= {f"optimizer{number}": optimizer for number, optimizer in enumerate(trainer.optimizers)}
        things |= {f"scheduler{number}": each.scheduler for number, each in enumerate(trainer.lr_scheduler_configs)}
        if (scaler := getattr(trainer.precision_plugin, "scaler", None)) is not None:
            things["scaler"] = scaler
        total = trainer.estimated_stepping_batches if pl_module.automatic_optimization else ENDLESS
        steps = int(min(total, ENDLESS)) if total > 0 else ENDLESS
        self._loop.begin(steps, 0, _warm_up(trainer), **things, **self._things)
        self._stepped = trainer.global_step

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Complete the previous batch, which may have ended a step."""
        self._position.batches = batch_idx
        self._loop.step_begins(self._position.steps)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Report the step, if the optimizer has stepped."""
        loss = _loss_of(outputs, trainer.callback_metrics)
        if loss is not None:
            self._loss = loss if self._loss is None else self._loss + loss
        if trainer.global_step == self._stepped:
            return  # gradients are accumulated over several batches
        self._stepped = trainer.global_step
        self._position.steps += 1
        if self._loop.step is not None:
            norm = _named(TOTAL_NORM, trainer.callback_metrics)
            self._loop.run.report(self._loop.step, loss=self._loss, grad_norm=norm)
        self._loss = None

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Complete the last step."""
        self._position.batches = 0
        self._loop.end()


def _warm_up(trainer: Trainer) -> Callable[[], object] | None:
    """A function that runs one forward and backward pass.

    DDP sums gradients in another order in its first backward pass, so this pass comes before the first step. None:
    there is only one process, or the module calls its optimizers itself.
    """
    module = trainer.lightning_module
    if trainer.world_size == 1 or not module.automatic_optimization:
        return None

    def once() -> None:
        loader = trainer.fit_loop._combined_loader
        batch, *_ = next(iter(CombinedLoader(loader.iterables, "max_size_cycle")))
        batch = trainer.strategy.batch_to_device(batch)
        loss = _loss_of(call._call_strategy_hook(trainer, "training_step", batch, 0), {}, detached=False)
        if loss is not None:
            loss.backward()
        trainer._logger_connector.reset_results()  # so that nothing of this pass is logged

    return once


def _loss_of(outputs: Any, logged: Mapping[str, Any], *, detached: bool = True) -> Any:
    """The loss that ``training_step`` returned, or else the loss that the module logged; None: there is no loss."""
    loss = outputs if isinstance(outputs, torch.Tensor) else None
    if isinstance(outputs, Mapping):
        loss = outputs.get("loss")
    if loss is None:
        return _named(LOSS, logged)
    return loss.detach() if detached else loss


def _named(names: tuple[str, ...], logged: Mapping[str, Any]) -> Any:
    return next((logged[name] for name in names if name in logged), None)
