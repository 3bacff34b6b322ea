"""A choice of copies never mixes runs of the same job name."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.decisions.keep.choose_restore import choose_restore, copies_by_step
from everstep.decisions.keep.lineage import FROM_NOTHING, Runs, is_ours, usable
from everstep.decisions.keep.starts import choose_start, left_by_earlier_run
from everstep.errors import CheckpointError
from everstep.model.job_state import EarlierRun
from everstep.model.machine import Assignment
from everstep.model.run_id import is_older, run_id
from everstep.model.state_copy import StateCopies, Tier
from everstep.model.topology import Topology

A, B, C = (f"20261121-1{hour}0000.000-aaaaaaaa" for hour in range(3))
TWO = Assignment(Topology.of(2, 1), ["m0", "m1"])
SIZES = str(TWO.topology)


def held(rank: int, step: int, run: str, *, tier: Tier = Tier.DISK, machine: str = "", **more: int) -> StateCopies:
    topology = SIZES if tier in {Tier.DISK, Tier.REMOTE} else ""
    return StateCopies.one(
        rank=rank, machine=machine or f"m{rank}", completed_steps=step, tier=tier, run=run, topology=topology, **more
    )


copies = st.lists(
    st.builds(
        held,
        st.integers(0, 1),
        st.integers(1, 4),
        st.sampled_from(["", A, B, C]),
        tier=st.sampled_from(list(Tier)),
        machine=st.sampled_from(["m0", "m1"]),
        generation=st.integers(0, 5),
    ),
    max_size=24,
).map(lambda found: [one.model_copy(update={"saved_ns": 1 + index}) for index, one in enumerate(found)])


@given(copies)
def test_all_copies_of_a_step_are_of_one_run(found: list[StateCopies]) -> None:
    for entries in copies_by_step(found, TWO).values():
        assert len({one.run for one in entries}) == 1


@given(copies, st.integers(-1, 4), st.lists(st.integers(0, 4), max_size=2))
def test_a_job_uses_its_own_copies_and_those_up_to_its_start(
    found: list[StateCopies], origin: int, later: list[int]
) -> None:
    lineage = list(enumerate([origin, *later], start=3))
    by_time = {one.saved_ns: one for one in found}
    usable_ones = usable(found, lineage, runs=Runs(B, (A,)))
    for entries in copies_by_step(usable_ones, TWO).values():
        for one in entries:
            source = by_time[one.saved_ns]
            led_here = source.completed_steps <= min([origin, *later]) and source.tier in {Tier.DISK, Tier.REMOTE}
            assert source.run in {"", B} or (source.run == A and led_here)


def test_a_run_that_has_the_step_for_all_ranks_is_chosen_and_of_two_the_latest() -> None:
    mixed = [held(0, 20, A), held(1, 20, A), held(0, 20, B, tier=Tier.OWN)]
    choice = choose_restore(mixed, TWO)
    assert choice.step == 20
    assert [copy.tier for copy in choice.copies] == [Tier.DISK, Tier.DISK]
    newer = copies_by_step([*mixed, held(1, 20, B)], TWO)[20]
    assert {one.run for one in newer} == {B}


def test_a_step_of_which_two_runs_left_a_part_each_is_refused_with_the_reason() -> None:
    with pytest.raises(CheckpointError, match="rank 0 on m0 has it only of another run"):
        choose_restore([held(0, 20, A), held(1, 20, B)], TWO, at=20)


def test_the_same_generation_and_step_of_another_run_are_not_ours() -> None:
    mine = Runs(B)
    assert is_ours(held(0, 20, B, generation=1), [(1, FROM_NOTHING)], mine)
    assert not is_ours(held(0, 20, A, generation=1), [(1, FROM_NOTHING)], mine)
    assert not is_ours(held(0, 20, A), [(1, FROM_NOTHING)], mine), (
        "a copy of another run is not ours, even if its generation is unknown"
    )
    assert is_ours(held(0, 20, "", generation=1), [(1, FROM_NOTHING)], mine), (
        "a copy of an older release names no run, so it may be ours"
    )


def test_all_steps_of_the_run_that_a_job_was_started_from_are_ours_up_to_the_start() -> None:
    mine = Runs(B, (A,))
    assert is_ours(held(0, 120, A, generation=9), [(1, 120)], mine)
    assert is_ours(held(0, 100, A, generation=9), [(1, 120)], mine), "run A passed step 100 on its way to 120"
    assert not is_ours(held(0, 140, A, generation=9), [(1, 120)], mine)
    assert not is_ours(held(0, 120, A, generation=9), [(1, 120), (2, 100)], mine), (
        "run B went back to step 100 and passed step 120 again"
    )
    assert not is_ours(held(0, 120, C, generation=9), [(1, 120)], mine)


def test_the_state_at_the_step_of_the_start_is_the_same_in_both_runs() -> None:
    both = [held(0, 120, A, generation=7), held(1, 120, B, tier=Tier.OWN)]
    choice = choose_restore(usable(both, [(1, 120)], runs=Runs(B, (A,))), TWO)
    assert (choice.step, [copy.ranks.first for copy in choice.copies]) == (120, [0])


def test_a_copy_that_failed_is_not_confused_with_another_save_of_its_step() -> None:
    first, second = held(0, 20, B, saved_ns=1), held(0, 20, B, saved_ns=2)
    bad = first.model_copy(update={"valid": False, "reason": "checksum"})
    assert [one.valid for one in usable([first, second], [(1, -1)], [bad])] == [False, True]
    untold = bad.model_copy(update={"saved_ns": 0})
    assert [one.valid for one in usable([first, second], [(1, -1)], [untold])] == [False, False]


def test_a_new_run_starts_from_files_only() -> None:
    memory = [held(rank, 20, A, tier=Tier.OWN) for rank in (0, 1)]
    files = [held(rank, 20, A) for rank in (0, 1)]
    assert left_by_earlier_run([*memory, *files], TWO.topology, 20) == files


def test_a_new_run_starts_only_from_steps_of_the_last_ones_lineage() -> None:
    """The last run had rolled back from step 30 to 10. One machine could not set files aside and still has step 20."""
    last = EarlierRun(run=B, origin_runs=[A], lineage=[(4, 5), (5, 10)])
    files = [held(0, 20, B, generation=5), held(1, 20, B, generation=4), *(held(r, 5, A, generation=9) for r in (0, 1))]
    with pytest.raises(CheckpointError, match="rank 1 lacks it; there are steps 5"):
        choose_start(files, TWO, last, at=20)
    chosen, runs = choose_start(files, TWO, last)
    assert (chosen.step, runs) == (5, [A]), (
        "the last run began at step 5, so it is its own step, although run A saved it"
    )
    chosen, runs = choose_start([held(0, 5, A), held(1, 5, B, generation=4)], TWO, last, at=5)
    assert (chosen.step, runs) == (5, [A, B])


def test_complete_steps_of_older_runs_can_be_used() -> None:
    last = EarlierRun(run=B, lineage=[(4, FROM_NOTHING)])
    older = [held(rank, 20, A, generation=3) for rank in (0, 1)]
    assert choose_start(older, TWO, last, at=20)[1] == [A]
    assert choose_start(older, TWO, last)[0].step == 20
    with pytest.raises(CheckpointError, match="rank 1 lacks it"):
        choose_start([held(0, 20, B, generation=4), held(1, 20, A, generation=3)], TWO, last, at=20)
    assert choose_start(older, TWO, EarlierRun(), at=20)[1] == [A], "the last run is unknown"


@given(copies, st.sampled_from(["", B]), st.none() | st.integers(1, 4))
def test_no_start_mixes_runs_but_at_the_step_from_which_the_last_one_began(
    found: list[StateCopies], last: str, at: int | None
) -> None:
    earlier = EarlierRun(run=last, origin_runs=[A], lineage=[(3, 2)])
    with contextlib.suppress(CheckpointError):
        chosen, runs = choose_start(found, TWO, earlier, at=at)
        assert len(runs) <= 1 or (last and chosen.step <= 2 and runs == [A, B])


def test_a_step_of_other_sizes_is_refused_with_both_and_what_to_do() -> None:
    four = Topology.of(4, 1)
    with pytest.raises(CheckpointError, match=r"sizes 2,1,1,1,pp-dp-tp, and the job has 4,1,1,1,.*--resume-path"):
        left_by_earlier_run([held(rank, 20, A) for rank in (0, 1)], four, 20)
    right = held(2, 20, C).model_copy(update={"topology": str(four)})
    assert left_by_earlier_run([held(0, 20, A), right], four, 20) == [right]


@given(st.integers(0, 4 * 10**18), st.integers(1_000_000, 10**18), st.text("0123456789abcdef-", min_size=8))
def test_ids_sort_as_the_runs_began(started_ns: int, after_ns: int, unique: str) -> None:
    earlier, later = run_id(started_ns, unique), run_id(started_ns + after_ns, "0" * 8)
    assert is_older(earlier, later)
    assert not is_older(later, earlier)
    assert is_older("", earlier)
