"""The ranks whose whole stacks and flight records are kept: those that a verdict names, and a few examples of the rest.

Ranks with the same activity have the same *signature*. Of each signature a few ranks are kept, the rarest signatures
first, because most ranks of a large job only wait.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence

from everstep.decisions.blame.hang.rank_samples import JobSamples, RankSample

OF_EACH = 3
"""The number of ranks of each signature that are kept."""
MOST_RANKS = 64
"""The largest number of named ranks that are kept, and the largest number of other ranks. If a job has no more ranks,
all are kept."""


def examples(samples: JobSamples, named: Sequence[int] = ()) -> Mapping[int, int]:
    """Return the ranks to keep → the number of ranks with the same signature, with the rank itself.

    Args:
        samples: One sample of all ranks.
        named: The ranks that a verdict names.
    """
    alike: dict[Hashable, list[int]] = defaultdict(list)
    for rank, sample in samples.ranks.items():
        alike[_signature(sample)].append(rank)
    kept = set(named[:MOST_RANKS])
    of_each = OF_EACH if len(samples.ranks) > MOST_RANKS else MOST_RANKS
    rarest = sorted(alike.values(), key=len)
    kept |= set([rank for ranks in rarest for rank in ranks[:of_each]][:MOST_RANKS])
    return {rank: len(ranks) for ranks in rarest for rank in ranks if rank in kept}


def _signature(sample: RankSample) -> Hashable:
    inside = sorted(pending.operation for pending in sample.record.pending) if sample.record else ()
    return sample.activity, sample.is_stopped, tuple(inside)
