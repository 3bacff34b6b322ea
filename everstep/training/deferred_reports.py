"""The numbers of a report: which values are accepted, and reports whose numbers are still on their way from a GPU."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from everstep.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

_warned: set[str] = set()


def plain(name: str, value: Any) -> Any:
    """A value from which a report can read a number without asking another rank: a number, or a tensor of one element.

    A replicated DTensor gives its local tensor. A DTensor that is spread over ranks (a gradient norm of FSDP2) has no
    number here: gathering it is a collective, in which a rank would wait for ranks that do not report. Such a norm is
    not known (None), and a warning says so once.

    Args:
        name: ``loss`` or ``grad_norm``.
        value: As given to ``report``.

    Raises:
        ConfigError: the value is none of these.
    """
    if type(value) is float:
        return value
    if (placements := getattr(value, "placements", None)) is not None and hasattr(value, "_local_tensor"):
        mesh = value.device_mesh
        if not all(placement.is_replicate() or mesh.size(axis) == 1 for axis, placement in enumerate(placements)):
            _spread(name, value)
            return None
        value = value._local_tensor
    elements = getattr(value, "numel", None) or getattr(value, "size", None)
    count = elements() if callable(elements) else elements
    if (hasattr(value, "item") and count == 1) or (hasattr(value, "__float__") and not hasattr(value, "item")):
        return value
    shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
    raise ConfigError(
        f"run.report({name}=…) got a {type(value).__name__}{shape}: give a number, or a tensor or array of one element"
    )


def on_device(value: Any) -> bool:
    """Return whether reading a value would wait for a GPU."""
    return getattr(value, "is_cuda", False) is True


def number(value: Any) -> float | None:
    """A number as a float, also that of a tensor of one element, which may require a gradient; None stays None."""
    if value is None or type(value) is float:
        return value
    item = getattr(value, "item", None)
    return float(value if item is None else item())


class PendingReport:
    """A report whose numbers are copied to the host in the stream's own order.

    ``item()`` would wait for all work of the stream; a copy into pinned memory with an
    event waits for the numbers only.

    Args:
        step: The step.
        loss: The loss, from ``plain``.
        grad_norm: The gradient norm, likewise.
        tokens: The tokens.
    """

    def __init__(self, step: int, loss: float | Tensor | None, grad_norm: float | Tensor | None, tokens: int) -> None:
        self._step, self._tokens = step, tokens
        self._events: list[Any] = []
        self._numbers = [self._aside(loss), self._aside(grad_norm)]

    def arrived(self) -> bool:
        """Return whether the numbers have arrived."""
        return all(event.query() for event in self._events)

    def values(self) -> tuple[int, float | None, float | None, int]:
        """Step, loss, gradient norm and tokens; waits for the numbers."""
        for event in self._events:
            event.synchronize()
        loss, grad_norm = map(number, self._numbers)
        return self._step, loss, grad_norm, self._tokens

    def _aside(self, value: float | Tensor | None) -> float | Tensor | None:
        if not on_device(value):
            return value
        import torch

        assert isinstance(value, torch.Tensor)
        with torch.cuda.device(value.device):  # the stream that the event follows is the current one of that device
            host = torch.empty((), dtype=torch.float64, pin_memory=True)
            host.copy_(value.detach().reshape(()), non_blocking=True)
            event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        self._events.append(event)
        return host


def _spread(name: str, value: Any) -> None:
    what = f"run.report({name}=…) got a DTensor that is spread over ranks ({', '.join(map(str, value.placements))})"
    advice = f"give {name}.full_tensor(), which all ranks have to call"
    if name == "loss":
        raise ConfigError(f"{what}: {advice}")
    if name not in _warned:
        _warned.add(name)
        warnings.warn(f"everstep: {what}, and is reported as not known: {advice}", RuntimeWarning, stacklevel=4)
