"""Reads the numbers of a report, also those that have to be copied from a GPU first."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from everstep.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

_warned: set[str] = set()


def plain(name: str, value: Any) -> Any:
    """Check a value of a report: it must be a number, or a tensor or array of one element.

    A replicated DTensor is replaced by its local tensor. The value of a DTensor that is spread over ranks, e.g. of a
    gradient norm of FSDP2, could only be gathered by a collective, in which this rank would wait for ranks that do not
    report. Such a norm counts as not known, and causes one warning. Such a loss is an error.

    Args:
        name: ``loss`` or ``grad_norm``.
        value: The value that was passed to ``report``.

    Returns:
        The value, from which ``number`` can read; None: it is not known.

    Raises:
        ConfigError: the value is not accepted.
    """
    if type(value) is float:
        return value
    if (placements := getattr(value, "placements", None)) is not None and hasattr(value, "_local_tensor"):
        mesh = value.device_mesh
        if not all(placement.is_replicate() or mesh.size(axis) == 1 for axis, placement in enumerate(placements)):
            _warn_of_spread(name, value)
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
    """Whether reading a value would wait for a GPU."""
    return getattr(value, "is_cuda", False) is True


def number(value: Any) -> float | None:
    """A number, or the element of a tensor or array of one element, as a float; None: it is not known."""
    if value is None or type(value) is float:
        return value
    item = getattr(value, "item", None)
    return float(value if item is None else item())


class PendingReport:
    """A report whose numbers are copied from a GPU without waiting.

    ``item()`` would wait for all work of the stream. Here the numbers are copied into pinned memory, and an event shows
    when they have arrived.

    Args:
        step: The step.
        loss: The loss, from ``plain``.
        grad_norm: The gradient norm, from ``plain``.
        tokens: The number of tokens.
    """

    def __init__(self, step: int, loss: float | Tensor | None, grad_norm: float | Tensor | None, tokens: int) -> None:
        self._step, self._tokens = step, tokens
        self._events: list[Any] = []
        self._numbers = [self._aside(loss), self._aside(grad_norm)]

    def arrived(self) -> bool:
        """Whether the numbers have arrived."""
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
        with torch.cuda.device(value.device):  # the event is recorded on the current stream of that device
            host = torch.empty((), dtype=torch.float64, pin_memory=True)
            host.copy_(value.detach().reshape(()), non_blocking=True)
            event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        self._events.append(event)
        return host


def _warn_of_spread(name: str, value: Any) -> None:
    problem = f"run.report({name}=…) got a DTensor that is spread over ranks ({', '.join(map(str, value.placements))})"
    advice = f"give {name}.full_tensor(), which all ranks have to call"
    if name == "loss":
        raise ConfigError(f"{problem}: {advice}")
    if name not in _warned:
        _warned.add(name)
        warnings.warn(f"everstep: {problem}, so its value is not known: {advice}", RuntimeWarning, stacklevel=4)
