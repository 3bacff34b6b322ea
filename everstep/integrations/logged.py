"""Reports the loss and the gradient norm that a script logs with another library, by their usual names."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from everstep.errors import ConfigError
from everstep.training.deferred_reports import plain
from everstep.training.run import Run

LOSS = ("loss", "train/loss", "train_loss", "training_loss", "loss/train", "train/loss_step", "train_loss_step")
"""Names of the loss of a training step, in upper or lower case; the first one that is logged counts."""
GRAD_NORM = ("grad_norm", "train/grad_norm", "gradient_norm", "train/gradient_norm", "grad_norm/train", "total_norm")
"""Names of the gradient norm."""


class Tap:
    """Turns logged values into reports, as long as the script does not report by itself.

    A step's values may be logged one by one. They are reported together, when a value of a later step is logged or the
    process ends.

    Args:
        run: The run from ``everstep.join``.
        loss: Names of the loss.
        grad_norm: Names of the gradient norm.
        undo: Removes the tap from the library.

    Raises:
        ConfigError: the names are not lists, or there is no name of the loss.
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
        """The step of the pending values; None: there are none."""
        self._pending: dict[str, Any] = {}
        """Values that are not reported yet, by argument of ``Run.report``."""
        self._own = run.reported
        self._logged = 0
        atexit.register(self.flush)

    def record(self, values: Mapping[str, Any], step: int | None) -> None:
        """Record logged values; values other than loss and gradient norm are ignored.

        Args:
            values: Name → value.
            step: The script's number of the step; None: the logged losses are counted. Within ``run.steps``, the number
                of the run's current step is used instead.
        """
        if not self._run.active or self._run.reported != self._own:
            return
        ours = {quantity: value for name, value in values.items() if (quantity := self._names.get(str(name).lower()))}
        if not ours:
            return
        at = self._run.step if self._run.step is not None else step
        if at is None:
            at = self._logged if "loss" in ours else self._step or 0
        if self._step is not None and at != self._step:
            self.flush()
        self._step = int(at)
        for quantity, value in ours.items():
            if quantity not in self._pending and _is_number(quantity, value):
                self._pending[quantity] = value
        self._logged += "loss" in ours

    def flush(self) -> None:
        """Report the pending values."""
        pending, self._pending, step, self._step = self._pending, {}, self._step, None
        if pending and step is not None and self._run.reported == self._own:
            self._run.report(step, **pending)
            self._own = self._run.reported

    def close(self) -> None:
        """Report the pending values, and remove the tap from the library."""
        self.flush()
        self._undo()
        atexit.unregister(self.flush)


def _is_number(quantity: str, value: Any) -> bool:
    try:
        return plain(quantity, value) is not None
    except ConfigError:
        return False  # e.g. a histogram or a text, which only the logger uses
