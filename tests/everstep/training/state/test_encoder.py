"""What is saved is the state as it is, whatever a script changed since the save before."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from everstep.slots.file import SlotFile
from everstep.slots.reader import held
from everstep.training.checkpoint import Checkpoint
from everstep.training.state.codec import decode
from everstep.training.state.digest import digest_of
from everstep.training.state.encoder import StateEncoder
from tests.shm import shm_folder


class Script:
    """The objects of a script, and what it may do to them between two saves."""

    def __init__(self, kind: str) -> None:
        torch.manual_seed(5)
        self.model: Any = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        made: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
            "AdamW": lambda params: torch.optim.AdamW(params, lr=torch.tensor(0.1)),
            "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.5),
            "Numbers": lambda params: Numbers(params, {"lr": 0.1}),
        }
        self.optimizer = made[kind](self.model.parameters())
        self.numbers: dict[str, Any] = {"count": 0}
        self.things: dict[str, Any] = {"optimizer": self.optimizer, "numbers": self, "model": self.model}

    def state_dict(self) -> dict[str, Any]:
        return dict(self.numbers)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.numbers = state

    def trains(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(4, 3)).square().mean().backward()
        self.optimizer.step()

    def counts(self) -> None:
        self.numbers["count"] += 1

    def holds_a_tensor(self) -> None:
        self.numbers["tensor"] = torch.rand(2)

    def holds_a_tensor_of_the_model(self) -> None:
        self.numbers["shared"] = self.model[0].weight.detach()[0]

    def changes_the_rate(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = group["lr"] * 0.5

    def gives_the_group_an_option(self) -> None:
        self.optimizer.param_groups[0]["name"] = "first"

    def gives_a_parameter_other_memory(self) -> None:
        self.model[0].weight.data = self.model[0].weight.data.clone() + 1

    def replaces_a_parameter(self) -> None:
        weight = nn.Parameter(self.model[2].bias.detach().clone() * 2)
        self.optimizer.state.pop(self.model[2].bias, None)
        parameters = self.optimizer.param_groups[0]["params"]
        parameters[[one is self.model[2].bias for one in parameters].index(True)] = weight
        self.model[2].bias = weight

    def replaces_a_buffer(self) -> None:
        self.model[1].running_mean = self.model[1].running_mean + 1

    def adds_a_module(self) -> None:
        self.model.add_module(f"more-{len(self.model)}", nn.BatchNorm1d(2, affine=False))

    def replaces_a_state(self) -> None:
        for state in self.optimizer.state.values():
            for key, value in state.items():
                state[key] = value + 1

    def gives_a_state_other_memory(self) -> None:
        for state in self.optimizer.state.values():
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    value.data = value.data + 1

    def forgets_a_state(self) -> None:
        self.optimizer.state.clear()

    def freezes(self) -> None:
        self.model[2].weight.requires_grad_(False)
        self.model[2].weight.grad = None


class Numbers(torch.optim.Optimizer):
    """An optimizer with numbers, texts and tensors in its state."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["step"] = state.get("step", 0) + 1
                state["mean"] = state.get("mean", 0) * 0.5 + (0 if parameter.grad is None else parameter.grad)
                parameter.sub_(0.1 * state["mean"])


ACTIONS = sorted(name for name in vars(Script) if not name.startswith("_") and not name.endswith("state_dict"))


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("kind", ["AdamW", "SGD", "Numbers"])
@settings(max_examples=40)
@given(actions=st.lists(st.sampled_from(["trains", *ACTIONS]), max_size=8))
def test_each_save_has_the_state_as_it_is(kind: str, overlap: bool, actions: list[str]) -> None:
    script, lost = Script(kind), 0
    with contextlib.ExitStack() as ended, warnings.catch_warnings():
        path = ended.enter_context(shm_folder()) / "checkpoint-0"
        file = SlotFile(path, slots=4)
        checkpoint = ended.enter_context(contextlib.closing(Checkpoint(script.things, file, overlap=overlap)))
        warnings.simplefilter("error")
        for step, action in enumerate([*actions, "counts"], 1):
            getattr(script, action)()
            expected = digest_of({name: thing.state_dict() for name, thing in script.things.items()})
            checkpoint.save(step)
            checkpoint.wait()
            if step not in [slot.completed_steps for slot in held(path)]:
                lost += 1
                continue
            payload = file.load(step)
            tree = decode(payload.structure, payload.tensors, {})
            saved = {name: tree[name] for name in script.things}
            assert digest_of(saved) == expected, f"after {action}"
            del payload, tree, saved
        assert lost <= 1, "only the first time that the state of an optimizer has other tensors may cost a save"


def test_the_state_dicts_are_not_asked_again_while_the_tensors_are_the_same(shm: Path) -> None:
    script = Script("AdamW")
    script.trains()
    encoder = StateEncoder(script.things)
    assert not encoder.look(completely=True)
    encoder.encode({}, gradients=False)
    for _ in range(3):
        script.trains()
        script.counts()
        assert encoder.look(completely=True)
        assert [*encoder.states] == ["numbers"]
        assert encoder.encode({}, gradients=False).same
    script.replaces_a_buffer()
    assert not encoder.look(completely=True)
    assert {*encoder.states} == {*script.things}
