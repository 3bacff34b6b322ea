"""A NaN of a drill is made in a forward pass, once, and goes where a real one goes."""

from __future__ import annotations

import torch

from everstep.training.poison import poison_forward


class Pair(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.arange(2), x


def test_the_next_forward_pass_is_poisoned_and_none_after_it() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    poison_forward()
    loss = model(torch.ones(1, 2)).sum()
    loss.backward()

    assert loss.isnan() and all(p.grad is not None and p.grad.isnan().all() for p in model[0].parameters())
    assert model(torch.ones(1, 2)).isfinite().all()


def test_whole_numbers_cannot_be_and_the_first_others_are() -> None:
    poison_forward()
    whole, floats = Pair()(torch.ones(3))
    assert whole.tolist() == [0, 1] and floats.isnan().all()
