"""A drill makes a NaN once, in a forward pass, and the NaN spreads like a real one."""

from __future__ import annotations

import pytest
import torch

from everstep.training.torch_faults import flip_gradient_bit, poison_forward


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


def gradients() -> tuple[torch.Tensor, list[torch.Tensor]]:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
    loss = model(torch.ones(2, 4)).square().mean()
    loss.backward()
    return loss, [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("finite", [False, True])
def test_one_bit_of_a_gradient_flips_once_and_no_output_changes(finite: bool) -> None:
    loss, right = gradients()
    flip_gradient_bit(finite)
    same, flipped = gradients()
    _, again = gradients()
    assert torch.equal(loss, same) and all(map(torch.equal, right, again))
    assert all(map(torch.equal, right[2:], flipped[2:])), "the gradients of the later layers do not change"
    bad = (flipped[1] != right[1]).nonzero()
    assert len(bad) == 1, "one element of the first bias's gradient changes"
    was, is_now = right[1][bad[0]].abs(), flipped[1][bad[0]].abs()
    assert (2 / 3 - 1e-6 <= is_now / was <= 1.5) if finite else is_now > 1e30


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_bit_of_the_fraction_leaves_every_kind_of_number_near_what_it_was(dtype: torch.dtype) -> None:
    model, x = torch.nn.Linear(4, 1).to(dtype), torch.ones(1, 4, dtype=dtype)
    flip_gradient_bit(True)
    model(x).sum().backward()
    assert model.bias.grad is not None and model.bias.grad.item() == 1.5, "the correct gradient is 1"
