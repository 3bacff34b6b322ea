"""Warns of buffers that a state dict leaves out although each step changes them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor


class UnsavedBuffers:
    """Watches the buffers that were registered with ``persistent=False``.

    The first body may fill a buffer that is computed once, e.g. a table of positions. So only a buffer that changes in
    a later body is reported.

    Args:
        things: The objects of ``Run.checkpoint``, by name.
    """

    def __init__(self, things: Mapping[str, Any]) -> None:
        self._things = things
        self._tables: list[tuple[str, str, dict[str, Tensor | None]]] | None = None
        """The buffers: path, key, and the table of their module."""
        self._before: list[tuple[Tensor | None, int]] = []

    def look(self) -> None:
        """Compare the buffers with those after the body before; called after each body."""
        if self._tables is None:
            self._tables = list(self._find())
            self._before = self._now()
            return
        if not self._tables:
            return
        now = self._now()
        changed = [
            f"{path}.{key}"
            for (path, key, _), (buffer, version), (earlier, old) in zip(self._tables, now, self._before, strict=True)
            if earlier is not None and (buffer is not earlier or version != old)
        ]
        self._before = now
        if changed:
            self._tables = []
            warnings.warn(
                f"everstep: {', '.join(changed[:3])}{' and others' if len(changed) > 3 else ''} changed in a step, but "
                "state_dict() leaves buffers with persistent=False out: after a restart they have the values of a new "
                "model. Register them with persistent=True if later steps depend on them",
                RuntimeWarning,
                stacklevel=4,
            )

    def _now(self) -> list[tuple[Tensor | None, int]]:
        buffers = [table.get(key) for _, key, table in self._tables or ()]
        return [(buffer, -1 if buffer is None else buffer._version) for buffer in buffers]

    def _find(self) -> Iterator[tuple[str, str, dict[str, Tensor | None]]]:
        for name, thing in self._things.items():
            if isinstance(thing, torch.nn.Module):
                for path, module in thing.named_modules(prefix=name):
                    for key in sorted(module._non_persistent_buffers_set):
                        yield path, key, module._buffers
