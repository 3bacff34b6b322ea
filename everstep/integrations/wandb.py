"""Reports the loss and the gradient norm that a script passes to ``wandb.log`` (Weights & Biases).

::

    everstep.integrations.wandb.tap()  # before wandb.init()
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
        run: The run from ``everstep.join``; None: the job is joined here, with its sizes.
        loss: Names of the loss.
        grad_norm: Names of the gradient norm.

    Raises:
        ConfigError: the names are not lists, or there is no name of the loss.
    """
    log = WandbRun.log

    def logged(self: WandbRun, data: dict[str, Any], step: int | None = None, *args: Any, **options: Any) -> None:
        log(self, data, step, *args, **options)
        tapped.record(data, step)

    def undo() -> None:
        WandbRun.log = log

    tapped = Tap(everstep.join() if run is None else run, loss, grad_norm, undo)
    WandbRun.log = logged
    return tapped
