"""Code that the scripts of ``across_bodies.py`` share."""

# mypy: disable-error-code="no-untyped-call,no-any-return"

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import everstep

STEPS = 16
WINDOW = 4
Script = tuple[dict[str, Any], Callable[[int], Any]]
SCRIPTS: dict[str, Callable[[everstep.Run], Script]] = {}


def script(make: Callable[[everstep.Run], Script]) -> Callable[[everstep.Run], Script]:
    """Register a script under its name."""
    SCRIPTS[make.__name__] = make
    return make


class Numbers:
    """The values that a script keeps in plain variables, as a part of the state."""

    def __init__(self, **values: Any) -> None:
        self.values = values

    def state_dict(self) -> dict[str, Any]:
        return dict(self.values)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = dict(state)


def network(*more: nn.Module) -> nn.Sequential:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), *more, nn.Linear(16, 4))
    model.add_module("side", nn.Identity())
    return model


def batch(step: int, rank: int = 0) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * rank + step))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def last_of_window(step: int) -> bool:
    return step % WINDOW == WINDOW - 1
