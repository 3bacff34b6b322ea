"""Samples of machines are merged in any order and in any steps, and two samples of a job are compared."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from everstep.decisions.blame.hang.rank_samples import JobSamples, Position, RankSample, compared, merged
from tests.everstep.decisions.blame.hang.drawn import machines
from tests.everstep.decisions.blame.hang.made import record


@given(parts=machines(), data=st.data())
def test_the_order_and_the_steps_of_a_merge_have_no_effect(parts: list[JobSamples], data: st.DataObject) -> None:
    whole = merged(parts)
    shuffled = data.draw(st.permutations(parts))
    cut = data.draw(st.integers(0, len(parts)))

    assert merged(shuffled) == whole
    assert merged([merged(shuffled[:cut]), merged(shuffled[cut:])]) == whole
    assert merged([whole, *shuffled]) == whole, "a part that is merged twice has no effect"
    assert list(whole.ranks) == sorted({rank for part in parts for rank in part.ranks})


def test_what_machines_show_is_in_the_merged_sample() -> None:
    first = JobSamples({0: RankSample(is_stopped=True)}, {"0": (0, 1)}, {"0": "world"}, unread=("a",))
    second = JobSamples({1: RankSample(sleeps=True)}, {"0": (0, 1), "1": (1, 2)}, unread=("b", "a"))
    assert merged([first, second]) == JobSamples(
        {0: RankSample(is_stopped=True), 1: RankSample(sleeps=True)},
        {"0": (0, 1), "1": (1, 2)},
        {"0": "world"},
        unread=("a", "b"),
    )


def test_a_rank_progressed_if_a_part_of_its_position_that_both_samples_have_differs() -> None:
    def sample(*positions: Position) -> JobSamples:
        return JobSamples({rank: RankSample(position=position) for rank, position in enumerate(positions)})

    first = sample(Position((1,)), Position((1,), (4, 4)), Position(), Position((), (4, 3)), Position((1, 2)))
    last = sample(Position((1,)), Position((1,), (5, 4)), Position((9,)), Position((7,)), Position((1, 3)))
    assert compared(first, last).moved == frozenset({1, 4})


def test_the_last_record_of_a_rank_counts_and_else_the_one_before() -> None:
    old, new = record({"0": 3}), record({"0": 4})
    first = JobSamples({0: RankSample(record=old), 1: RankSample(record=old)}, {"0": (0, 1)}, {"0": "world"})
    last = JobSamples({0: RankSample(record=new), 1: RankSample(), 2: RankSample()})

    found = compared(first, last)

    assert [found.of(rank).record for rank in range(3)] == [new, old, None]
    assert (found.groups, found.labels) == ({"0": (0, 1)}, {"0": "world"})
