"""Acts out the faults of drills inside torch: wrong numbers like those of a broken machine, and hangs like those of
real jobs."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from everstep.rank.drill_faults import Action

NEVER_S = 1_000_000.0
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def poison_forward() -> None:
    """Make the first output of the next module that runs in this process NaN.

    The NaN then spreads as a real one does: through the forward pass into the loss, into the gradients, and with the
    next optimizer step into the parameters of every rank.
    """

    def poisoned(_module: torch.nn.Module, _inputs: Any, output: Any) -> Any:
        poisoned_output = _with_nan(output)
        if poisoned_output is not None:
            handle.remove()
        return poisoned_output

    handle = torch.nn.modules.module.register_module_forward_hook(poisoned)


def flip_gradient_bit(finite: bool = False) -> None:
    """Flip a bit of a number in the backward pass of the next module that runs.

    The number is the largest one of the gradient, so that rounding does not hide the flip.

    Args:
        finite: True: flip the highest bit of the fraction, so that the exponent stays and the number looks normal.
            False: flip the highest bit of the exponent, which makes a gradient below 2 extremely large.
    """

    def watched(_module: torch.nn.Module, _inputs: Any, output: Any) -> None:
        tensors = output if isinstance(output, tuple | list) else (output,)
        first = next((tensor for tensor in tensors if isinstance(tensor, torch.Tensor) and tensor.requires_grad), None)
        if first is not None:
            handle.remove()
            first.register_hook(partial(_flipped, finite))  # type: ignore[no-untyped-call]

    handle = torch.nn.modules.module.register_module_forward_hook(watched)


def _flipped(finite: bool, gradient: torch.Tensor) -> torch.Tensor:
    """The gradient with a bit flipped; for a DTensor, in this rank's shard."""
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
        for index, part in enumerate(output):
            if (poisoned := _with_nan(part)) is not None:
                return type(output)((*output[:index], poisoned, *output[index + 1 :]))
    return None


def skip_collective() -> None:
    """Leave out the next all-reduce of this process, so that its group waits for it."""
    real = dist.all_reduce

    def left_out(*_: Any, **__: Any) -> None:
        dist.all_reduce = real

    dist.all_reduce = left_out  # type: ignore[assignment]


def hang_dataloader() -> None:
    """Wait for a batch of a data loader whose process reads from storage that never answers."""
    next(iter(DataLoader(SilentShards(), num_workers=1)))


def wrong_order() -> None:
    """Enter collectives of two groups, in another order on odd ranks than on even ranks; no machine causes this
    hang."""
    groups: list[Any] = [None, dist.new_group()]
    for group in groups if dist.get_rank() % 2 else reversed(groups):
        dist.all_reduce(torch.ones(3), group=group)


class SilentShards(Dataset[torch.Tensor]):
    """A data set that never answers."""

    def __len__(self) -> int:
        """Number of items."""
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        """Wait for an item."""
        return self.read_shard(index)

    def read_shard(self, index: int) -> torch.Tensor:
        """Read from storage that never answers."""
        time.sleep(NEVER_S)
        return torch.zeros(index)


ACTIONS: Mapping[str, Action] = {
    "nan": lambda _: poison_forward(),
    "bitflip": lambda fault: flip_gradient_bit(bool(fault.get("finite"))),
    "skip-collective": lambda _: skip_collective(),
    "hang-dataloader": lambda _: hang_dataloader(),
    "wrong-order": lambda _: wrong_order(),
}
"""Name of a fault → the function that acts it out in this process."""
