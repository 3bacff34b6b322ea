"""Compares the step times of two ways of training, which take turns in short blocks of steps.

On a shared processor the speed changes by a third from one second to the next. So there are many short blocks, and each
block is compared with its neighbour. The fastest steps are compared, and all steps too. Each comparison has a
confidence interval.
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
    """Return the 10th percentile of the steps, seconds.

    The fastest steps show a cost that every step has, without the noise of other programs. A cost that only some steps
    have can be seen in the mean.
    """
    return quantile([step for block in blocks for step in block], 0.1)


def median(blocks: Blocks) -> float:
    """Return the median of the steps, seconds."""
    return quantile([step for block in blocks for step in block], 0.5)


def mean(blocks: Blocks) -> float:
    """Return the mean of all steps, seconds."""
    return sum(map(sum, blocks)) / sum(map(len, blocks))


def interval(with_s: Blocks, without_s: Blocks, of: Callable[[Blocks], float]) -> tuple[float, float]:
    """Return the 95 % confidence interval of the share of throughput that is lost, by a bootstrap over pairs of
    blocks."""
    draw = random.Random(1)
    pairs = list(zip(with_s, without_s, strict=True))
    found = []
    for _ in range(RESAMPLES):
        ours, peer = zip(*draw.choices(pairs, k=len(pairs)), strict=True)
        found.append(1 - of(peer) / of(ours))
    return quantile(found, 0.025), quantile(found, 0.975)
