"""Reports from values that a script logs elsewhere: loss and gradient norm, by their usual names."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from everstep.errors import ConfigError
from everstep.training.deferred_reports import plain
from everstep.training.run import Run

LOSS = ("loss", "train/loss", "train_loss", "training_loss", "loss/train", "train/loss_step", "train_loss_step")
"""Names of the loss of a training step, whatever their case; the first that is logged counts."""
GRAD_NORM = ("grad_norm", "train/grad_norm", "gradient_norm", "train/gradient_norm", "grad_norm/train", "total_norm")
"""Names of the gradient norm."""


class Tap:
    """Turns logged values into reports, as long as the script does not report by itself.

    A step's values may be logged one by one: they are reported together, once
    something of a later step is logged, or the process ends.

    Args:
        run: From ``everstep.join``.
        loss: Names of the loss.
        grad_norm: Names of the gradient norm.
        undo: Removes the tap from the library.

    Raises:
        ConfigError: no names are given.
    """

    def __init__(
        self, run: Run, loss: Sequence[str], grad_norm: Sequence[str], undo: Callable[[], None] = lambda: None
    ) -> None:
        if isinstance(loss, str) or isinstance(grad_norm, str) or not loss:
            raise ConfigError("tap(loss=…, grad_norm=…) takes lists of names, as in loss=['train/ce']")
        self._run = run
        self._names = {name.lower(): "loss" for name in loss} | {name.lower(): "grad_norm" for name in grad_norm}
        self._undo = undo
        self._step: int | None = None
        """The step whose values are kept; None: there are none."""
        self._held: dict[str, Any] = {}
        self._own = run.reported
        self._logged = 0
        atexit.register(self.flush)

    def take(self, values: Mapping[str, Any], step: int | None) -> None:
        """Note logged values; those that are no loss or gradient norm are ignored.

        Args:
            values: Name → value.
            step: The script's number of the step; within ``run.steps`` that number counts. None: steps are counted.
        """
        if not self._run.active or self._run.reported != self._own:
            return
        found = {what: value for name, value in values.items() if (what := self._names.get(str(name).lower()))}
        if not found:
            return
        at = self._run.step if self._run.step is not None else step
        if at is None:
            at = self._logged if "loss" in found else self._step or 0
        if self._step is not None and at != self._step:
            self.flush()
        self._step = int(at)
        for what, value in found.items():
            if what not in self._held and _is_number(what, value):
                self._held[what] = value
        self._logged += "loss" in found

    def flush(self) -> None:
        """Report the values that are kept."""
        held, self._held, step, self._step = self._held, {}, self._step, None
        if held and step is not None and self._run.reported == self._own:
            self._run.report(step, **held)
            self._own = self._run.reported

    def close(self) -> None:
        """Report the values that are kept, and let the library log as before."""
        self.flush()
        self._undo()
        atexit.unregister(self.flush)


def _is_number(what: str, value: Any) -> bool:
    try:
        return plain(what, value) is not None
    except ConfigError:
        return False  # a histogram, a text: the logger knows what to do with it
