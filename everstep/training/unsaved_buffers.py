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
        self._modules = {name: thing for name, thing in things.items() if isinstance(thing, torch.nn.Module)}
        self._before: dict[str, tuple[Tensor, int]] | None = None
        self._watching = True

    def look(self) -> None:
        """Compare the buffers with those after the body before; called after each body."""
        if not self._watching:
            return
        now = {name: (buffer, buffer._version) for name, buffer in self._buffers()}
        before, self._before = self._before, now
        if before is None:
            return
        changed = [
            name
            for name, (buffer, version) in now.items()
            if name in before and (before[name][0] is not buffer or before[name][1] != version)
        ]
        if changed:
            self._watching = False
            warnings.warn(
                f"everstep: {', '.join(changed[:3])}{' and others' if len(changed) > 3 else ''} changed in a step, but "
                "state_dict() leaves buffers with persistent=False out: after a restart they have the values of a new "
                "model. Register them with persistent=True if later steps depend on them",
                RuntimeWarning,
                stacklevel=4,
            )

    def _buffers(self) -> Iterator[tuple[str, Tensor]]:
        for name, model in self._modules.items():
            for path, module in model.named_modules(prefix=name):
                for key in module._non_persistent_buffers_set:
                    buffer = module._buffers.get(key)
                    if buffer is not None:
                        yield f"{path}.{key}", buffer
