"""The ranks whose whole stacks are kept: those that are named, and a few of each signature."""

from __future__ import annotations

from everstep.decisions.blame.hang.examples import MOST_RANKS, OF_EACH, examples
from everstep.decisions.blame.hang.rank_samples import JobSamples, RankSample
from tests.everstep.decisions.blame.hang.made import COMPUTES, STUCK, SYNC, of_stacks, stack


def test_of_a_large_job_a_few_ranks_of_each_signature_are_kept_and_the_others_are_counted() -> None:
    samples = of_stacks(dict.fromkeys(range(9_600), SYNC) | dict.fromkeys(range(500, 508), COMPUTES) | {77: STUCK})
    kept = examples(samples, named=[77, 9_000])
    assert kept == {77: 1, **dict.fromkeys(range(500, 500 + OF_EACH), 8), **dict.fromkeys((0, 1, 2, 9_000), 9_591)}


def test_of_a_small_job_all_ranks_are_kept() -> None:
    samples = of_stacks(dict.fromkeys(range(MOST_RANKS), SYNC) | {3: STUCK})
    assert examples(samples).keys() == samples.ranks.keys()


def test_ranks_that_differ_in_their_state_or_operation_have_other_signatures() -> None:
    one = RankSample(SYNC)
    assert examples(JobSamples({0: one, 1: one, 2: RankSample(SYNC, is_stopped=True)})) == {0: 2, 1: 2, 2: 1}


def test_the_number_of_ranks_is_limited_and_the_rarest_come_first() -> None:
    odd = {rank: stack("train", f"step_{rank}") for rank in range(MOST_RANKS - 2)}
    kept = examples(of_stacks(dict.fromkeys(range(1_000), SYNC) | odd))
    assert kept.keys() == odd.keys() | {MOST_RANKS - 2, MOST_RANKS - 1}
