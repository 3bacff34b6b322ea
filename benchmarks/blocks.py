"""Two ways of training whose blocks of steps take turns: how much longer a step takes one way, and how sure that is.

Where others use the same processor its speed changes by a third from one second to the next. So neighbouring blocks
are compared, many short ones, and of each side the fastest steps beside all of them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from benchmarks.common import quantile

RESAMPLES = 2000
"""Number of resamples of the bootstrap behind the interval."""
Blocks = Sequence[Sequence[float]]
"""Seconds of each step, block by block."""


def fastest(blocks: Blocks) -> float:
    """The 10th percentile of the steps, seconds.

    A cost of *every* step shows in the fastest steps too, without the noise of other programs. A cost of only some
    steps shows in the mean alone, together with that noise.
    """
    return quantile([step for block in blocks for step in block], 0.1)


def median(blocks: Blocks) -> float:
    """The median of the steps, seconds."""
    return quantile([step for block in blocks for step in block], 0.5)


def mean(blocks: Blocks) -> float:
    """The mean of all steps, seconds."""
    return sum(map(sum, blocks)) / sum(map(len, blocks))


def interval(with_s: Blocks, without_s: Blocks, of: Callable[[Blocks], float]) -> tuple[float, float]:
    """The 95 % confidence interval of the loss, by a bootstrap over the pairs of blocks."""
    draw = random.Random(1)
    pairs = list(zip(with_s, without_s, strict=True))
    found = []
    for _ in range(RESAMPLES):
        ours, peer = zip(*draw.choices(pairs, k=len(pairs)), strict=True)
        found.append(1 - of(peer) / of(ours))
    return quantile(found, 0.025), quantile(found, 0.975)
