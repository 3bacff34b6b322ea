"""Digests of what the reference model computed."""

from __future__ import annotations

import pytest
import torch

from agent.diagnoser.reference.step import digest, flip_bit


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
