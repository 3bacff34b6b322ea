"""Losses that are still on their way from a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def on_device(value: Any) -> bool:
    """Whether reading a value would wait for a GPU."""
    return getattr(value, "is_cuda", False) is True


def number(value: Any) -> float:
    """A number, or what a tensor of one element holds; one that requires a gradient may be given as it is."""
    if type(value) is float:
        return value
    item = getattr(value, "item", None)
    return float(value if item is None else item())


class Held:
    """One report whose numbers are copied to the host in the stream's own order.

    ``item()`` would wait for everything that the stream still has to do; a copy
    into pinned memory with an event waits for the numbers only.
    """

    def __init__(self, step: int, loss: float | Tensor, grad_norm: float | Tensor, tokens: int) -> None:
        import torch

        self._step, self._tokens = step, tokens
        self._numbers = [self._aside(loss), self._aside(grad_norm)]
        self._event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record()

    def arrived(self) -> bool:
        """Whether the numbers are there."""
        return bool(self._event.query())

    def values(self) -> tuple[int, float, float, int]:
        """Step, loss, gradient norm and tokens; waits for the numbers."""
        self._event.synchronize()
        loss, grad_norm = (float(number) for number in self._numbers)
        return self._step, loss, grad_norm, self._tokens

    @staticmethod
    def _aside(value: float | Tensor) -> float | Tensor:
        if not on_device(value):
            return value
        import torch

        assert isinstance(value, torch.Tensor)
        host = torch.empty((), dtype=torch.float64, pin_memory=True)
        return host.copy_(value.detach().double().reshape(()), non_blocking=True)
