"""Gradients that a later step uses are part of the state. Gradients that no step needs are not saved."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from everstep.errors import CheckpointError
from everstep.slots.file import SlotFile
from everstep.slots.reader import held
from everstep.slots.tensor_table import split
from everstep.training.checkpoint import Checkpoint

Body = Callable[[int], None]


class Training:
    """A model and its optimizer. The first layer's weight has another order in memory."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
        self.model[0].weight = nn.Parameter(torch.randn(4, 8).T)
        self.unused = nn.Linear(2, 2)
        self.model.add_module("unused", nn.Identity())
        self.optimizer = torch.optim.AdamW([*self.model.parameters(), *self.unused.parameters()], **options)
        self.things: dict[str, Any] = {"model": self.model, "unused": self.unused, "optimizer": self.optimizer}

    def backward(self, step: int) -> None:
        self.model(torch.full((3, 4), 1.0 + step)).square().mean().backward()


@pytest.fixture
def make(shm: Path) -> Iterator[Callable[..., Checkpoint]]:
    """Return a function that makes a checkpoint, which is closed at the end."""
    made = []

    def make(training: Training) -> Checkpoint:
        made.append(Checkpoint(training.things, SlotFile(shm / "c", slots=4), overlap=True))
        return made[-1]

    yield make
    for checkpoint in made:
        checkpoint.close()


@pytest.fixture
def steps_in(shm: Path) -> Callable[[], list[int]]:
    return lambda: sorted(slot.completed_steps for slot in held(shm / "c") if slot.valid)


def gradients_in(shm: Path, step: int) -> set[str]:
    """Return the names of the gradients in a save."""
    file = SlotFile(shm / "c")
    payload = file.load(step)
    names = {spec.name for spec in split(payload.structure)[0] if spec.name.startswith("everstep.gradients.tensors.")}
    del payload
    file.close()
    return {name.removeprefix("everstep.gradients.tensors.") for name in names}


ALL = {"model.0.weight", "model.0.bias", "model.1.weight", "model.1.bias"}


def test_pending_gradients_are_saved_and_restored_with_their_order_in_memory(
    make: Callable[..., Checkpoint], shm: Path
) -> None:
    training = Training()
    checkpoint = make(training)
    training.backward(1)
    checkpoint.save(1)
    checkpoint.wait()
    assert gradients_in(shm, 1) == ALL
    again = Training()
    again.backward(7)
    again.unused(torch.ones(1, 2)).sum().backward()
    make(again).restore(1)
    turned = False
    for old, new in zip(training.model.parameters(), again.model.parameters(), strict=True):
        assert old.grad is not None and new.grad is not None
        assert torch.equal(old.grad, new.grad) and old.grad.stride() == new.grad.stride()
        turned = turned or not old.grad.is_contiguous()
    assert turned
    assert again.unused.weight.grad is None


@pytest.mark.parametrize("first", [True, False])
def test_a_loop_that_drops_its_gradients_saves_none(make: Callable[..., Checkpoint], shm: Path, first: bool) -> None:
    training = Training()
    checkpoint = make(training)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(4):
            if first:
                training.optimizer.zero_grad()
            training.backward(step)
            training.optimizer.step()
            if not first:
                training.optimizer.zero_grad()
            checkpoint.save(step + 1)
    checkpoint.wait()
    assert not any(gradients_in(shm, step) for step in (1, 2, 3, 4))


def test_clipping_and_a_closure_are_no_second_use(make: Callable[..., Checkpoint], shm: Path) -> None:
    training = Training()
    checkpoint = make(training)

    def closure() -> torch.Tensor:
        training.optimizer.zero_grad()
        training.backward(1)
        nn.utils.clip_grad_norm_(training.model.parameters(), 0.1)
        return torch.tensor(0.0)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(3):
            training.optimizer.step(closure)
            checkpoint.save(step + 1)
    checkpoint.wait()
    assert not any(gradients_in(shm, step) for step in (1, 2, 3))


def test_gradients_are_saved_while_they_accumulate_only(make: Callable[..., Checkpoint], shm: Path) -> None:
    training = Training()
    checkpoint = make(training)
    found = []
    for step in range(8):
        training.backward(step)
        if step % 4 == 3:
            training.optimizer.step()
            training.optimizer.zero_grad()
        checkpoint.save(step + 1)
        checkpoint.wait()
        found.append(gradients_in(shm, step + 1))
    assert found == [ALL, ALL, ALL, set()] * 2


def test_a_backward_pass_behind_the_step_makes_them_pending(make: Callable[..., Checkpoint], shm: Path) -> None:
    training = Training()
    checkpoint = make(training)
    training.backward(0)
    training.optimizer.step()
    training.model[1](torch.ones(1, 8)).sum().backward()  # a GAN's generator does this to the discriminator
    checkpoint.save(1)
    checkpoint.wait()
    assert gradients_in(shm, 1) == {"model.1.weight", "model.1.bias"}


def test_gradients_that_are_zeros_are_not_none(make: Callable[..., Checkpoint], shm: Path) -> None:
    """An optimizer changes a parameter whose gradient is zero, but does not change a parameter without a gradient."""
    training = Training()
    checkpoint = make(training)
    training.backward(0)
    training.optimizer.step()
    training.optimizer.zero_grad(set_to_none=False)
    checkpoint.save(1)
    checkpoint.wait()
    assert gradients_in(shm, 1) == ALL


@pytest.mark.parametrize("how", ["step", "backward"])
def test_used_gradients_that_are_used_again_are_noticed(
    make: Callable[..., Checkpoint], shm: Path, steps_in: Callable[[], list[int]], how: str
) -> None:
    training = Training()
    checkpoint = make(training)
    training.backward(0)
    training.optimizer.step()
    checkpoint.save(1)
    checkpoint.wait()
    checkpoint.save(2)  # this body did nothing
    checkpoint.wait()
    assert steps_in() == [1, 2] and not gradients_in(shm, 2)
    with pytest.warns(RuntimeWarning, match="had used were not dropped .* from step 1 on, are not kept"):
        training.backward(1)
        if how == "step":
            training.optimizer.step()
        checkpoint.save(3)
    checkpoint.wait()
    assert steps_in() == [3]
    assert gradients_in(shm, 3) == ALL
    training.backward(2)
    training.optimizer.step()
    checkpoint.save(4)
    checkpoint.wait()
    assert steps_in() == [3, 4] and gradients_in(shm, 4) == ALL


@pytest.mark.parametrize("how", ["step", "backward"])
def test_a_run_that_went_on_without_gradients_it_uses_again_is_refused(
    make: Callable[..., Checkpoint], how: str
) -> None:
    training = Training()
    checkpoint = make(training)
    training.backward(0)
    training.optimizer.step()
    checkpoint.save(1)  # that the script does not drop the gradients is not known yet
    checkpoint.wait()
    again = Training()
    second = make(again)
    second.restore(1)
    if how == "step":
        with pytest.raises(CheckpointError, match="the state after step 1, from which this run resumed, lacks grad"):
            again.optimizer.step()
        return
    second.save(2)
    again.backward(1)
    with pytest.raises(CheckpointError, match="the state after step 1, from which this run resumed, lacks grad"):
        second.save(3)


def a_scaled_body(training: Training, *, skipped: bool) -> None:
    scaler = training.things["scaler"]
    training.optimizer.zero_grad()
    loss = training.model(torch.ones(1, 4)).sum() * (float("inf") if skipped else 1)
    scaler.scale(loss).backward()
    scaler.step(training.optimizer)
    scaler.update()


@pytest.mark.parametrize("skipped", [0, 2])
def test_a_step_that_a_scaler_skips_leaves_nothing_to_save(
    make: Callable[..., Checkpoint], shm: Path, skipped: int
) -> None:
    training = Training()
    training.things["scaler"] = scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    checkpoint = make(training)
    checkpoint.discard()  # the loop does this when it begins
    for step in range(4):
        a_scaled_body(training, skipped=step == skipped)
        checkpoint.save(step + 1)
    checkpoint.wait()
    assert scaler.get_scale() == 2.0
    assert not any(gradients_in(shm, step) for step in (1, 2, 3, 4))


def test_the_first_step_after_a_restart_may_be_skipped(make: Callable[..., Checkpoint], shm: Path) -> None:
    first, again = Training(), Training()
    for training, scale in ((first, 4.0), (again, 65536.0)):
        training.things["scaler"] = torch.amp.GradScaler("cpu", init_scale=scale)
    checkpoint = make(first)
    checkpoint.discard()
    a_scaled_body(first, skipped=False)
    checkpoint.save(1)
    checkpoint.close()
    second = make(again)
    second.restore(1)
    a_scaled_body(again, skipped=True)
    second.save(2)
    second.wait()
    assert not gradients_in(shm, 2)


def test_gradients_that_accumulate_under_a_scaler_that_was_set_before_the_loop_are_saved(
    make: Callable[..., Checkpoint], shm: Path
) -> None:
    training = Training()
    training.things["scaler"] = scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    checkpoint = make(training)
    scaler.load_state_dict(torch.amp.GradScaler("cpu", init_scale=2.0).state_dict())
    checkpoint.discard()
    scaler.scale(training.model(torch.ones(1, 4)).sum()).backward()
    checkpoint.save(1)
    checkpoint.wait()
    assert gradients_in(shm, 1) == ALL


def test_sparse_gradients_that_accumulate_come_back(make: Callable[..., Checkpoint], shm: Path) -> None:
    training = Training()
    training.things["words"] = words = nn.Embedding(9, 2, sparse=True)
    checkpoint = make(training)
    words(torch.tensor([1, 2])).sum().backward()
    checkpoint.save(1)
    checkpoint.close()
    again = Training()
    again.things["words"] = fresh = nn.Embedding(9, 2, sparse=True)
    make(again).restore(1)
    assert fresh.weight.grad is not None
    assert words.weight.grad is not None
    assert fresh.weight.grad.is_sparse
    assert torch.equal(fresh.weight.grad.to_dense(), words.weight.grad.to_dense())


def test_a_gradient_that_does_not_fit_is_named(make: Callable[..., Checkpoint]) -> None:
    training = Training()
    checkpoint = make(training)
    training.backward(0)
    checkpoint.save(1)
    checkpoint.wait()
    other = Training()
    del other.things["unused"]
    other.things["unused"] = nn.Linear(2, 2)
    other.model[1].weight.requires_grad_(False)
    make(other).restore(1)  # the parameter is frozen now, but an optimizer would still use its gradient
    assert other.model[1].weight.grad is not None


def test_no_hook_is_left_behind(make: Callable[..., Checkpoint]) -> None:
    from torch.optim import optimizer as torch_optimizer

    hooks = (torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks)
    before = [len(one) for one in hooks]
    checkpoint = make(Training())
    assert [len(one) for one in hooks] != before
    checkpoint.close()
    assert [len(one) for one in hooks] == before
