"""The digests of two states are equal if the states are equal bit for bit."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch

from everstep.training.checkpoint import Checkpoint
from everstep.training.state.digest import digest_of

STATE: dict[Any, Any] = {"a": torch.arange(6.0).reshape(2, 3), "b": [1, 2.5, None, "x"], 7: numpy.arange(3)}


def test_equal_states_have_equal_digests_in_any_order_of_keys() -> None:
    again = {key: STATE[key] for key in reversed(list(STATE))}
    strided = again | {"a": torch.arange(6.0).reshape(2, 3).t().contiguous().t()}
    assert digest_of(STATE) == digest_of(again) == digest_of(strided)
    assert len(digest_of(STATE)) == 16


@pytest.mark.parametrize(
    "change",
    [
        {"a": torch.arange(6.0).reshape(3, 2)},
        {"a": torch.arange(6.0, dtype=torch.float64).reshape(2, 3)},
        {"a": torch.nextafter(torch.arange(6.0), torch.tensor(9.0)).reshape(2, 3)},
        {"a": -torch.zeros(2, 3)},
        {"b": [1, 2.5, None, "y"]},
        {"b": (1, 2.5, None, "x")},
        {"b": [1, 2.5000000000000004, None, "x"]},
        {7: numpy.arange(3, dtype=numpy.int32)},
        {8: 0},
    ],
)
def test_any_difference_changes_the_digest(change: dict[Any, Any]) -> None:
    assert digest_of(STATE | change) != digest_of(STATE)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.bool, torch.complex64, torch.uint8])
def test_all_types_of_numbers_have_digests(kind: torch.dtype) -> None:
    assert digest_of(torch.ones(3, dtype=kind)) != digest_of(torch.zeros(3, dtype=kind))
    assert digest_of(torch.ones((), dtype=kind)) != digest_of(torch.ones(1, dtype=kind))
    assert digest_of(torch.empty(0, dtype=kind)) == digest_of(torch.empty(0, dtype=kind))


def test_a_checkpoint_has_the_digest_of_its_state() -> None:
    model = torch.nn.Linear(2, 2)
    checkpoint = Checkpoint({"model": model}, None)
    before = checkpoint.digest()
    torch.rand(1)  # the states of generators are not part of the digest
    assert checkpoint.digest() == before == digest_of({"model": model.state_dict()})
    with torch.no_grad():
        model.weight[0, 0] += 1
    assert checkpoint.digest() != before
