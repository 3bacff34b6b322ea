"""Copies of steps that the job has disowned are never used."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from everstep.decisions.keep.lineage import FROM_NOTHING, KEPT, extended, is_ours, usable
from everstep.model.state_copy import StateCopies, Tier


def held(step: int, generation: int, **more: object) -> StateCopies:
    return StateCopies.one(rank=0, machine="m0", completed_steps=step, generation=generation, **more)


def test_copies_beyond_the_step_of_a_later_launch_are_disowned() -> None:
    line = [(1, FROM_NOTHING), (2, 20)]

    assert is_ours(held(20, 1), line)
    assert not is_ours(held(21, 1), line)
    assert is_ours(held(21, 2), line)


def test_an_earlier_run_of_the_name_is_disowned_by_a_fresh_start() -> None:
    assert not is_ours(held(5, 3), [(4, FROM_NOTHING)])
    assert is_ours(held(5, 3), [(4, 5)]), "the job was started from this copy"


def test_a_generation_that_was_never_launched_belongs_to_another_run() -> None:
    assert not is_ours(held(5, 9), [(4, FROM_NOTHING)])
    assert is_ours(held(5, 9), []), "the job began before lineages were recorded"


def test_a_copy_of_another_run_is_used_only_at_the_step_of_our_start() -> None:
    assert is_ours(held(120, 7), [(1, 120)])
    assert is_ours(held(120, 7), [(1, 120), (2, 125)])
    assert not is_ours(held(121, 7), [(1, 120)])
    assert not is_ours(held(119, 7), [(1, 120)])
    assert not is_ours(held(120, 7), [(1, 120), (2, 100), (3, 130)]), "this run later computed step 120 again"
    assert not is_ours(held(120, 7), [(3, 120)]), "it is not known where the run began"


def test_a_copy_without_a_generation_is_used() -> None:
    assert is_ours(held(5, 0), [(4, FROM_NOTHING)])


def test_only_the_failed_copy_is_marked_with_the_reason() -> None:
    bad = held(20, 1, tier=Tier.BACKUP, valid=False, reason="checksum")

    found = usable([held(20, 1, tier=Tier.BACKUP), held(20, 1), held(21, 1)], [(1, -1), (2, 20)], [bad])

    assert [(one.tier, one.valid, one.reason) for one in found] == [
        (Tier.BACKUP, False, "checksum"),
        (Tier.OWN, True, ""),
    ]


@given(st.lists(st.integers(-1, 500), min_size=1, max_size=3 * KEPT), st.integers(1, 310), st.integers(0, 500))
def test_a_shortened_lineage_accepts_no_copy_that_the_complete_one_refuses(
    steps: list[int], generation: int, step: int
) -> None:
    whole = list(enumerate(steps, start=1))
    short = extended([], whole)

    assert len(short) <= KEPT
    assert short[-1][0] == whole[-1][0]
    if is_ours(held(step, generation), short):
        assert is_ours(held(step, generation), whole)
    if generation >= len(steps) - KEPT + 1:
        assert is_ours(held(step, generation), short) == is_ours(held(step, generation), whole)
