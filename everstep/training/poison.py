"""Wrong numbers for drills, made where a broken part would make them: a NaN on the way forward, a bit on the way
back."""

from __future__ import annotations

import math
from functools import partial
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


def flip_gradient_bit(finite: bool = False) -> None:
    """Flip one bit of one number on the way back through the next module that runs.

    It is the number that is largest there, so that nothing of it is lost in rounding. All that follows is what a real
    bit flip does.

    Args:
        finite: It is the highest bit of the fraction, with which the number has the same exponent: nothing that follows
            looks odd. Else that of the exponent, with which a gradient below 2 is as large as numbers get.
    """

    def watched(_module: torch.nn.Module, _inputs: Any, output: Any) -> None:
        tensors = output if isinstance(output, tuple | list) else (output,)
        found = next((one for one in tensors if isinstance(one, torch.Tensor) and one.requires_grad), None)
        if found is not None:
            handle.remove()
            found.register_hook(partial(_flipped, finite))  # type: ignore[no-untyped-call]

    handle = torch.nn.modules.module.register_module_forward_hook(watched)


BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def _flipped(finite: bool, gradient: torch.Tensor) -> torch.Tensor:
    """The same but for one bit; of a tensor that is spread over ranks it is one of this rank's part."""
    flipped = gradient.clone()
    local = flipped.to_local() if hasattr(flipped, "to_local") else flipped
    flat = local.detach().reshape(-1).view(BITS[local.element_size()])
    fraction_bits = round(-math.log2(torch.finfo(local.dtype).eps))
    bit = fraction_bits - 1 if finite else 8 * local.element_size() - 2
    flat[local.detach().abs().reshape(-1).argmax()] ^= 1 << bit
    return flipped


def _with_nan(output: Any) -> Any:
    """The output with a NaN in its first tensor of floating point numbers; None: there is none."""
    if isinstance(output, torch.Tensor):
        return output * torch.nan if output.is_floating_point() else None
    if isinstance(output, tuple | list):
        for place, part in enumerate(output):
            if (found := _with_nan(part)) is not None:
                return type(output)((*output[:place], found, *output[place + 1 :]))
    return None
