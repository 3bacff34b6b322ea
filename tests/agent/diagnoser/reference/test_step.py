"""Digests of what the reference model computed."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from agent.diagnoser.reference.step import LEARNING_RATE, digest, first_adamw_step, flip_bit


def test_a_digest_sees_every_bit() -> None:
    one = torch.tensor([1.0, 2.0])
    assert digest([one]) == digest([one.clone()])
    assert digest([torch.tensor(0.0)]) != digest([torch.tensor(-0.0)])
    assert digest([torch.tensor(float("nan"))]) == digest([torch.tensor(float("nan"))])
    assert digest([one.t()]) == digest([one])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_flipped_bit_is_too_small_for_a_loss_and_not_for_a_digest(dtype: torch.dtype) -> None:
    one = torch.linspace(1, 2, 64, dtype=dtype).view(8, 8)
    before, digest_before = one.clone(), digest([one])
    flip_bit(one)

    assert digest([one]) != digest_before
    assert int((one != before).sum()) == 1
    assert float((one.float() - before.float()).abs().sum()) < 0.01
    flip_bit(one)
    assert digest([one]) == digest_before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_step_has_the_bits_of_the_class_which_agents_of_earlier_releases_have(dtype: torch.dtype) -> None:
    made = torch.Generator().manual_seed(7)
    ours = [torch.randn(12, 5, generator=made).to(dtype).requires_grad_() for _ in range(3)]
    theirs = [one.detach().clone().requires_grad_() for one in ours]
    for one, other in zip(ours, theirs, strict=True):
        one.grad = torch.randn(12, 5, generator=made).to(dtype)
        other.grad = one.grad.clone()
    before = digest(ours)
    first_adamw_step(ours)
    torch.optim.AdamW(theirs, lr=LEARNING_RATE, foreach=False, fused=False).step()
    assert digest(ours) == digest(theirs) != before


def test_nothing_of_it_imports_the_compiler() -> None:
    """It takes seconds of CPU, of every machine that is tested."""
    program = (
        "import sys, torch; from agent.diagnoser.reference.step import first_adamw_step as step\n"
        "one = torch.ones(3, requires_grad=True); one.grad = torch.ones(3); step([one])\n"
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
