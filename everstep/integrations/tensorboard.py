"""Reports the loss and the gradient norm that a script writes to TensorBoard with a ``SummaryWriter``.

::

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
        run: The run from ``everstep.join``; None: the job is joined here, with its sizes.
        loss: Tags of the loss; for ``add_scalars``, main tag and tag with a ``/`` between them.
        grad_norm: Tags of the gradient norm.

    Raises:
        ConfigError: the names are not lists, or there is no name of the loss.
    """
    add_scalar, add_scalars = SummaryWriter.add_scalar, SummaryWriter.add_scalars

    def scalar(
        self: Any, tag: str, scalar_value: Any, global_step: int | None = None, *args: Any, **options: Any
    ) -> None:
        add_scalar(self, tag, scalar_value, global_step, *args, **options)
        tapped.record({tag: scalar_value}, global_step)

    def scalars(
        self: Any,
        main_tag: str,
        tag_scalar_dict: dict[str, Any],
        global_step: int | None = None,
        *args: Any,
        **options: Any,
    ) -> None:
        add_scalars(self, main_tag, tag_scalar_dict, global_step, *args, **options)
        tapped.record({f"{main_tag}/{tag}": value for tag, value in tag_scalar_dict.items()}, global_step)

    def undo() -> None:
        SummaryWriter.add_scalar, SummaryWriter.add_scalars = add_scalar, add_scalars  # type: ignore[method-assign]

    tapped = Tap(everstep.join() if run is None else run, loss, grad_norm, undo)
    SummaryWriter.add_scalar, SummaryWriter.add_scalars = scalar, scalars  # type: ignore[method-assign]
    return tapped
