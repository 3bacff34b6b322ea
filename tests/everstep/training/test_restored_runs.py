"""The law of restores: a run that everstep restores goes on as the undisturbed one, or as the one that torch restores.

``torch.save`` and ``torch.load`` of the same objects are the measure. Where torch's own restore loses state, the
undisturbed run is.
"""

from __future__ import annotations

import random

import pytest

from tests.everstep.training.recording_cuda import stand_in_for_gpu
from tests.everstep.training.restored_runs import Way, verdict, ways

ALL = list(ways())


def check(way: Way) -> None:
    assert verdict(way) != "otherwise", f"{way}: the run differs from the undisturbed one, and from torch's"


@pytest.mark.parametrize("seed", range(8))
def test_some_ways(seed: int) -> None:
    """Each run of the tests plays the same ways; ``make law`` plays all of them."""
    for way in random.Random(seed).sample(ALL, 12):
        check(way)


def test_some_ways_whose_tensors_are_copied_as_from_a_gpu() -> None:
    for way in random.Random(9).sample(ALL, 12):
        with stand_in_for_gpu() as cuda:
            assert verdict(way, cuda) != "otherwise", way


@pytest.mark.wide
@pytest.mark.parametrize("optimizer", sorted({way.optimizer for way in ALL}))
def test_all_ways(optimizer: str) -> None:
    for way in ALL:
        if way.optimizer == optimizer:
            check(way)
