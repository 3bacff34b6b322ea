"""Compares two ways of training that take turns in short blocks of steps, with a confidence interval.

On a shared processor the speed changes by a third from one second to the next. So each block is compared with its
neighbour, there are many short blocks, and the fastest steps are compared as well as all steps.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from benchmarks.common import quantile

RESAMPLES = 2000
"""Number of resamples of the bootstrap."""
Blocks = Sequence[Sequence[float]]
"""Seconds of each step, block by block."""


def fastest(blocks: Blocks) -> float:
    """The 10th percentile of the steps, seconds.

    They show the cost of every step without the noise of other programs. Costs of only some steps show in the mean.
    """
    return quantile([step for block in blocks for step in block], 0.1)


def median(blocks: Blocks) -> float:
    """The median of the steps, seconds."""
    return quantile([step for block in blocks for step in block], 0.5)


def mean(blocks: Blocks) -> float:
    """The mean of all steps, seconds."""
    return sum(map(sum, blocks)) / sum(map(len, blocks))


def interval(with_s: Blocks, without_s: Blocks, of: Callable[[Blocks], float]) -> tuple[float, float]:
    """The 95 % confidence interval of the loss, the share by which steps with are longer, by a bootstrap over pairs."""
    draw = random.Random(1)
    pairs = list(zip(with_s, without_s, strict=True))
    found = []
    for _ in range(RESAMPLES):
        ours, peer = zip(*draw.choices(pairs, k=len(pairs)), strict=True)
        found.append(1 - of(peer) / of(ours))
    return quantile(found, 0.025), quantile(found, 0.975)
