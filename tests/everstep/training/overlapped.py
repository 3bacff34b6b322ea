"""A training whose saves overlap it, and a way to stop the thread that copies."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch
from torch import nn

from everstep.slots.file import SlotFile
from everstep.slots.reader import held
from everstep.training.checkpoint import Stateful
from everstep.training.state.codec import decode


class Pause:
    """Stops the copying thread in the middle of a save, until it may continue."""

    def __init__(self) -> None:
        self.reached, self.go = threading.Event(), threading.Event()

    def meet(self, _completed_steps: int) -> None:
        self.reached.set()
        assert self.go.wait(30)


def steps_in(path: Path) -> list[int]:
    return sorted(slot.completed_steps for slot in held(path) if slot.valid)


def saved(path: Path, step: int) -> Any:
    payload = SlotFile(path).load(step)
    return decode(payload.structure, payload.tensors, {})


class Training:
    """A model whose parameters have optimizers or none, with buffers, and with large and small tensors."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.entry = nn.Linear(64, 512)
        self.last = nn.Linear(512, 64, bias=False)
        self.model = nn.Sequential(self.entry, nn.BatchNorm1d(512), self.last)
        self.turned = nn.Parameter(torch.randn(200, 100).T)
        self.free = nn.Linear(8, 8)
        self.first = torch.optim.AdamW([*self.entry.parameters(), self.turned], fused=True)
        self.second = torch.optim.SGD(self.last.parameters(), momentum=0.9, lr=0.01)
        self.things: dict[str, Stateful] = {
            "model": self.model,
            "free": self.free,
            "first": self.first,
            "second": self.second,
        }

    def backward(self, *, accumulate: bool = False) -> None:
        if not accumulate:
            self.first.zero_grad()
            self.model.zero_grad()
        (self.model(torch.randn(4, 64)).square().mean() + self.turned.square().mean()).backward()

    def gradients(self) -> list[tuple[str, torch.Tensor]]:
        """Return the parameters, each with the name that its gradient has in a save."""
        named = [(f"model.{name}", parameter) for name, parameter in self.model.named_parameters()]
        return [*named, ("first.0.2", self.turned)]

    def snapshot(self) -> Any:
        """Return a copy of everything that a save would contain now."""
        return clone({name: thing.state_dict() for name, thing in self.things.items()})


def clone(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        return tree.detach().clone()
    if isinstance(tree, dict):
        return {key: clone(value) for key, value in tree.items()}
    return [clone(item) for item in tree] if isinstance(tree, list) else tree


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and raw(left) == raw(right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(same(a, b) for a, b in zip(left, right, strict=True))
    return bool(left == right)


def raw(tensor: torch.Tensor) -> bytes:
    """Return the bits, so that NaN is equal to itself."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def without_ours(tree: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in tree.items() if not name.startswith("everstep.")}
