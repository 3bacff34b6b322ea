"""The states of generators are those of now, also if a generator was not used since the last save."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import numpy
import pytest
import torch
from numpy.random.mtrand import get_bit_generator, set_bit_generator

from everstep.training.rng import RandomState

USES: dict[str, Callable[[], object]] = {
    "nothing": lambda: None,
    "torch": lambda: torch.rand(3),
    "numpy": numpy.random.rand,
    "numpy, many": lambda: numpy.random.rand(700),
    "numpy, one of a pair": numpy.random.randn,
    "numpy, a seed": lambda: numpy.random.seed(7),
    "numpy, other bits": lambda: set_bit_generator(numpy.random.PCG64(3)),
    "numpy, usual bits": lambda: set_bit_generator(numpy.random.MT19937(3)),
    "random": random.random,
    "random, one of a pair": lambda: random.gauss(0, 1),
    "random, a seed": lambda: random.seed(7),
}


@pytest.fixture(autouse=True)
def generators() -> Iterator[None]:
    """Give all generators their states back."""
    bits, state, words = get_bit_generator(), torch.get_rng_state(), random.getstate()
    yield
    set_bit_generator(bits)
    torch.set_rng_state(state)
    random.setstate(words)


def draws() -> list[float]:
    numbers = [torch.rand(()).item(), float(numpy.random.randn()), float(numpy.random.rand())]
    return [*numbers, random.gauss(0, 1), random.random()]


@pytest.mark.parametrize("seed", range(100))
def test_after_any_uses_a_state_brings_the_same_numbers_back(seed: int) -> None:
    saving = RandomState()
    for use in random.Random(seed).choices(list(USES), k=seed % 9):
        saving.state_dict()
        USES[use]()
    state = saving.state_dict()
    expected = draws()
    RandomState().load_state_dict(state)
    assert draws() == expected


def test_the_state_of_a_generator_that_was_not_used_is_not_made_again() -> None:
    saving = RandomState()
    first = saving.state_dict()
    torch.rand(1)
    second = saving.state_dict()
    assert first["numpy"] is second["numpy"] and first["python"] is second["python"]
    assert not torch.equal(first["torch"], second["torch"])
