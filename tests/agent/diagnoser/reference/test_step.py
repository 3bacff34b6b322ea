"""Digests of the results of the reference model."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from agent.diagnoser.process import ONE_THREAD
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
    """The import of torch's compiler takes seconds of CPU, on every rank of every tested machine."""
    program = """
import sys
from agent.diagnoser.ranks import OWN, Meeting, listening, run_ranks
from agent.diagnoser.reference.settings import ReferenceLimits
from agent.diagnoser.process import ONE_THREAD
from agent.diagnoser.reference.step import ReferenceRank

limits = ReferenceLimits(seconds=0.0, dim=16, layers=2, batch=2, sequence=4)
def work(rank):
    rounds = ReferenceRank(rank, limits, "m0").repeat()["rounds"]
    return {"rounds": rounds, "imported": [name for name in ("torch._dynamo", "sympy") if name in sys.modules]}
listener, port = listening()
said = run_ranks(8, Meeting(OWN, port, 8, listener=listener, timeout_s=60.0), work, within_s=60.0)
sys.exit(any(one["imported"] or one["rounds"] < 2 for one in said))
"""
    environment = os.environ | ONE_THREAD | {"GLOO_SOCKET_IFNAME": "lo"}
    assert subprocess.run([sys.executable, "-c", program], env=environment, check=False).returncode == 0
