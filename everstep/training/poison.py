"""A NaN for drills, made where a broken part would make one: in a forward pass."""

from __future__ import annotations

from typing import Any

import torch


def poison_forward() -> None:
    """Make the first output of the next module that runs in this process NaN.

    All that follows is what a real NaN does: it goes through the rest of the
    forward pass into the loss, from there into the gradients, and with the next
    step of the optimizer into the parameters of every rank.
    """

    def poisoned(_module: torch.nn.Module, _inputs: Any, output: Any) -> Any:
        found = _with_nan(output)
        if found is not None:
            handle.remove()
        return found

    handle = torch.nn.modules.module.register_module_forward_hook(poisoned)


def _with_nan(output: Any) -> Any:
    """The output with a NaN in its first tensor of floating point numbers; None: there is none."""
    if isinstance(output, torch.Tensor):
        return output * torch.nan if output.is_floating_point() else None
    if isinstance(output, tuple | list):
        for place, part in enumerate(output):
            if (found := _with_nan(part)) is not None:
                return type(output)((*output[:place], found, *output[place + 1 :]))
    return None
