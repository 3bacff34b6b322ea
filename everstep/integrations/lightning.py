"""PyTorch Lightning's ``Trainer``: one line, and it goes on after a fault as if nothing had been.

trainer = Trainer(max_epochs=…) everstep.integrations.lightning.attach(trainer) trainer.fit(model)
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
"""Steps of a training whose length Lightning does not know."""
TOTAL_NORM = ("grad_2.0_norm_total", *GRAD_NORM)
"""Names of the gradient norm: first the one that Lightning's own ``grad_norm`` gives it."""
ACROSS_PROCESSES = ("DeepSpeedStrategy", "FSDPStrategy", "ModelParallelStrategy")
"""Strategies that keep parameters or optimizer state in a way of their own: not tried with everstep."""


def attach(trainer: Trainer, run: Run | None = None, **things: Stateful) -> Run:
    """Have a trainer report its steps, save after each of them, and go on where the job stood.

    Modules, optimizers, schedulers, scaler, random states and the position in the data are kept. The loss of this rank
    is reported, and the gradient norm where the module logs it. Outside everstep the trainer trains as ever.

    Args:
        trainer: The trainer, before ``fit`` is called; call that without ``ckpt_path``.
        run: From ``everstep.join``; None: joined here, with the job's sizes.
        things: More objects of the state, as for ``run.checkpoint``.

    Raises:
        ConfigError: the trainer's strategy shards the model in a way of its own.
    """
    run = everstep.join() if run is None else run
    if not run.active:
        return run
    strategy = type(trainer.strategy).__name__
    if strategy in ACROSS_PROCESSES:
        raise ConfigError(f"attach(trainer): {strategy} shards model or optimizer in a way of its own; DDP can be used")
    follower = _LightningCallback(trainer, DrivenLoop(run), things)
    trainer.callbacks.append(follower)
    follower.take_over()
    return run


class _LightningPlace:
    """The state of the trainer's loops."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.steps = 0
        """Steps of the optimizer that are complete."""
        self.batches = 0
        """Batches of the epoch that are complete."""
        self.random: dict[str, Any] = {}
        """Random states when the epoch's order of the data was drawn."""
        self.restored = False
        """The state was restored, and its epoch was not entered yet."""
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
        """The batches of the epoch that are complete count as done; the trainer takes an epoch to begin."""
        self._load_counts()
        progress = self._trainer.fit_loop.epoch_loop.batch_progress
        progress.total.ready = progress.total.started = progress.total.processed = progress.total.completed
        for name in ("ready", "started", "processed", "completed"):
            setattr(progress.current, name, self.batches)


class _LightningCallback(Callback):  # type: ignore[misc]  # the library is not there where types are checked
    """Goes along with the trainer's loops."""

    def __init__(self, trainer: Trainer, loop: DrivenLoop, things: dict[str, Stateful]) -> None:
        self._loop, self._things = loop, things
        self._place = _LightningPlace(trainer)
        self._random = RandomState()
        self._stepped = 0
        """The trainer's count of optimizer steps at the end of the last batch."""
        self._loss: Any = None
        """Sum over the micro-batches of a step, as they add up to its loss."""

    def take_over(self) -> None:
        """Stand where the trainer makes the iterator of an epoch."""
        trainer, place = self._place._trainer, self._place
        epoch_loop = trainer.fit_loop.epoch_loop
        begin, fit = epoch_loop.on_run_start, trainer.fit

        def begun(data_fetcher: Any) -> None:
            skip = place.batches if place.restored else 0
            if place.restored:
                # Without loader processes the order is drawn with the first batch. With them that of the first epoch is
                # drawn earlier, before anything can be restored: alike where the script seeds.
                self._random.load_state_dict(place.random)
            else:
                place.random = self._random.state_dict()
            begin(data_fetcher)
            for _ in range(skip):
                next(data_fetcher)
            if place.restored:
                place.enter()
            place.restored = False

        def fitted(*args: Any, **options: Any) -> Any:
            try:
                return fit(*args, **options)
            finally:
                self._loop.leave()

        epoch_loop.on_run_start, trainer.fit = begun, fitted

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Everything is made, and the order of the first epoch is drawn: restore."""
        known: dict[str, Any] = {"module": pl_module, "trainer": self._place}
        known |= {f"optimizer{number}": optimizer for number, optimizer in enumerate(trainer.optimizers)}
        known |= {f"scheduler{number}": kept.scheduler for number, kept in enumerate(trainer.lr_scheduler_configs)}
        if (scaler := getattr(trainer.precision_plugin, "scaler", None)) is not None:
            known["scaler"] = scaler
        total = trainer.estimated_stepping_batches if pl_module.automatic_optimization else ENDLESS
        steps = int(min(total, ENDLESS)) if total > 0 else ENDLESS
        self._loop.begin(steps, 0, _warm_up(trainer), **known, **self._things)
        self._stepped = trainer.global_step

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """The batch before is complete, and with it perhaps a step."""
        self._place.batches = batch_idx
        self._loop.step_begins(self._place.steps)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Report the step, if the optimizer has stepped."""
        loss = _loss_of(outputs, trainer.callback_metrics)
        if loss is not None:
            self._loss = loss if self._loss is None else self._loss + loss
        if trainer.global_step == self._stepped:
            return  # gradients add up
        self._stepped = trainer.global_step
        self._place.steps += 1
        if self._loop.step is not None:
            norm = _named(TOTAL_NORM, trainer.callback_metrics)
            self._loop.run.report(self._loop.step, loss=self._loss, grad_norm=norm)
        self._loss = None

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        """The last step is complete."""
        self._place.batches = 0
        self._loop.end()


def _warm_up(trainer: Trainer) -> Callable[[], object] | None:
    """A forward and a backward pass: DDP sums gradients in another order before its first one than after it.

    None: there is one process only, or the module steps its optimizers itself.
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
        trainer._logger_connector.reset_results()  # nothing of this is logged

    return once


def _loss_of(outputs: Any, logged: Mapping[str, Any], *, detached: bool = True) -> Any:
    """The loss that ``training_step`` returned, else the one that the module logged; None: there is neither."""
    loss = outputs if isinstance(outputs, torch.Tensor) else None
    if isinstance(outputs, Mapping):
        loss = outputs.get("loss")
    if loss is None:
        return _named(LOSS, logged)
    return loss.detach() if detached else loss


def _named(names: tuple[str, ...], logged: Mapping[str, Any]) -> Any:
    return next((logged[name] for name in names if name in logged), None)
