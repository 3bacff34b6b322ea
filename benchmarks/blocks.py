"""Two ways of training whose blocks of steps take turns: how much longer a step takes one way, and how sure that is.

Where others use the same processor its speed changes by a third from one second to the next. So neighbouring blocks
are compared, many short ones, and of each side the fastest steps beside all of them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from benchmarks.common import quantile

RESAMPLES = 2000
"""Of the bootstrap behind the interval."""
Blocks = Sequence[Sequence[float]]
"""Seconds of each step, block by block."""


def fastest(blocks: Blocks) -> float:
    """Seconds that the fastest tenth of the steps stay below.

    What costs *every* step its share costs the fastest as well: these show it. What it costs now and then shows in the
    mean of all alone, beside what the others did.
    """
    return quantile([step for block in blocks for step in block], 0.1)


def median(blocks: Blocks) -> float:
    """Seconds that half of the steps stay below."""
    return quantile([step for block in blocks for step in block], 0.5)


def mean(blocks: Blocks) -> float:
    """Seconds of a step, of all together."""
    return sum(map(sum, blocks)) / sum(map(len, blocks))


def interval(with_s: Blocks, without_s: Blocks, of: Callable[[Blocks], float]) -> tuple[float, float]:
    """In what range the loss lies with a probability of 95 %, by a bootstrap over the pairs of blocks."""
    draw = random.Random(1)
    pairs = list(zip(with_s, without_s, strict=True))
    found = []
    for _ in range(RESAMPLES):
        ours, peer = zip(*draw.choices(pairs, k=len(pairs)), strict=True)
        found.append(1 - of(peer) / of(ours))
    return quantile(found, 0.025), quantile(found, 0.975)
