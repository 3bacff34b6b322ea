"""TensorBoard: everstep reports the values that are written with a ``SummaryWriter``, without further lines.

everstep.integrations.tensorboard.tap()
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.utils.tensorboard import SummaryWriter

import everstep
from everstep.integrations.logged import GRAD_NORM, LOSS, Tap
from everstep.training.run import Run


def tap(run: Run | None = None, *, loss: Sequence[str] = LOSS, grad_norm: Sequence[str] = GRAD_NORM) -> Tap:
    """Report what a script writes with torch's ``SummaryWriter``, unless it reports by itself.

    Args:
        run: From ``everstep.join``; None: joined here, with the job's sizes.
        loss: Tags under which the loss is written; of ``add_scalars`` the two names with a ``/`` between.
        grad_norm: Tags under which the gradient norm is written.

    Raises:
        ConfigError: no names are given.
    """
    add_scalar, add_scalars = SummaryWriter.add_scalar, SummaryWriter.add_scalars

    def scalar(
        self: Any, tag: str, scalar_value: Any, global_step: int | None = None, *args: Any, **options: Any
    ) -> None:
        add_scalar(self, tag, scalar_value, global_step, *args, **options)
        tapped.take({tag: scalar_value}, global_step)

    def scalars(
        self: Any,
        main_tag: str,
        tag_scalar_dict: dict[str, Any],
        global_step: int | None = None,
        *args: Any,
        **options: Any,
    ) -> None:
        add_scalars(self, main_tag, tag_scalar_dict, global_step, *args, **options)
        tapped.take({f"{main_tag}/{tag}": value for tag, value in tag_scalar_dict.items()}, global_step)

    def undo() -> None:
        SummaryWriter.add_scalar, SummaryWriter.add_scalars = add_scalar, add_scalars  # type: ignore[method-assign]

    tapped = Tap(everstep.join() if run is None else run, loss, grad_norm, undo)
    SummaryWriter.add_scalar, SummaryWriter.add_scalars = scalar, scalars  # type: ignore[method-assign]
    return tapped
