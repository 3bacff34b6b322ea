"""Weights & Biases: everstep reports the values that are passed to ``wandb.log``, without further lines.

everstep.integrations.wandb.tap()      # before wandb.init()
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from wandb.sdk.wandb_run import Run as WandbRun

import everstep
from everstep.integrations.logged import GRAD_NORM, LOSS, Tap
from everstep.training.run import Run


def tap(run: Run | None = None, *, loss: Sequence[str] = LOSS, grad_norm: Sequence[str] = GRAD_NORM) -> Tap:
    """Report what a script logs with wandb, unless it reports by itself.

    Args:
        run: From ``everstep.join``; None: joined here, with the job's sizes.
        loss: Names under which the loss is logged.
        grad_norm: Names under which the gradient norm is logged.

    Raises:
        ConfigError: no names are given.
    """
    log = WandbRun.log

    def logged(self: WandbRun, data: dict[str, Any], step: int | None = None, *args: Any, **options: Any) -> None:
        log(self, data, step, *args, **options)
        tapped.take(data, step)

    def undo() -> None:
        WandbRun.log = log

    tapped = Tap(everstep.join() if run is None else run, loss, grad_norm, undo)
    WandbRun.log = logged
    return tapped
