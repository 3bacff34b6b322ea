"""Tests of pairs: any single bad machine and any single bad link is named, among any number of machines."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.decisions.blame.diagnose.pairs import (
    FURTHER_ROUNDS,
    Pair,
    Pairs,
    judge_pairs,
    next_round,
    pair_of,
    shifted_rounds,
)


def names(count: int) -> list[str]:
    return [f"m{index}" for index in range(count)]


def carried_out(machines: list[str], passes: Callable[[Pair], bool | None]) -> tuple[Pairs, int]:
    """Return the result, and the number of rounds until it is known."""
    seen: dict[Pair, bool | None] = {}
    shifted, rounds = len(shifted_rounds(machines)), 0
    while pairs := next_round(machines, seen, max(0, rounds - shifted)):
        assert len({machine for pair in pairs for machine in pair}) == 2 * len(pairs), (
            "each machine is in one pair of a round"
        )
        assert all(pair not in seen for pair in pairs)
        seen |= {pair: passes(pair) for pair in pairs}
        rounds += 1
    return judge_pairs(machines, seen), rounds


@pytest.mark.parametrize("count", range(9))
def test_in_the_shifted_rounds_each_machine_meets_both_neighbours(count: int) -> None:
    rounds = shifted_rounds(names(count))
    met = [pair for one in rounds for pair in one]

    assert len(rounds) == (0 if count < 2 else 1 if count == 2 else 2 + count % 2)
    assert len(set(met)) == len(met) == (count if count > 2 else count // 2)
    for index, machine in enumerate(names(count)):
        others = {names(count)[(index + step) % count] for step in (-1, 1)} - {machine}
        assert {pair_of(machine, other) for other in others} == {pair for pair in met if machine in pair}


@given(st.integers(3, 64), st.data())
def test_a_single_bad_machine_is_named_after_the_shifted_rounds(count: int, data: st.DataObject) -> None:
    machines = names(count)
    bad = data.draw(st.sampled_from(machines))
    found, rounds = carried_out(machines, lambda pair: bad not in pair)

    assert found == Pairs(machines=(bad,))
    assert rounds == len(shifted_rounds(machines))


@given(st.integers(3, 64), st.data())
def test_a_single_bad_link_is_named_and_no_machine(count: int, data: st.DataObject) -> None:
    machines = names(count)
    at = data.draw(st.integers(0, count - 1))
    bad = pair_of(machines[at], machines[(at + 1) % count])
    found, rounds = carried_out(machines, lambda pair: pair != bad)

    assert found == Pairs(links=(bad,))
    assert rounds == len(shifted_rounds(machines))


@given(st.integers(2, 40), st.data())
def test_among_several_bad_machines_no_working_machine_is_named(count: int, data: st.DataObject) -> None:
    machines = names(count)
    bad = data.draw(st.sets(st.sampled_from(machines)))
    found, rounds = carried_out(machines, bad.isdisjoint)

    assert set(found.machines) <= bad
    assert found.links == ()
    assert bad <= {*found.machines, *found.unsure}
    assert rounds <= len(shifted_rounds(machines)) + FURTHER_ROUNDS
    neighbours_work = any(bad.isdisjoint(pair) for one in shifted_rounds(machines) for pair in one)
    if neighbours_work and len(bad) * 2 <= count and count > 3:
        assert set(found.machines) == bad, "each of them met two machines that work"


@pytest.mark.parametrize("bad", [{"m0"}, {"m1"}, {"m0", "m1"}])
def test_of_two_machines_none_is_named(bad: set[str]) -> None:
    found, _ = carried_out(["m0", "m1"], bad.isdisjoint)

    assert found == Pairs(unsure=("m0", "m1"))


def test_if_nothing_works_no_machine_is_named() -> None:
    found, rounds = carried_out(names(6), lambda _: False)

    assert found == Pairs(unsure=tuple(names(6)))
    assert rounds == 2


def test_a_pair_that_could_not_be_run_neither_accuses_nor_clears_a_machine() -> None:
    gone = "m3"
    found, _ = carried_out(names(6), lambda pair: None if gone in pair else True)
    assert found == Pairs(unsure=(gone,))

    found, _ = carried_out(names(6), lambda pair: None if gone in pair else "m0" not in pair)
    assert found == Pairs(machines=("m0",), unsure=(gone,))


def test_a_suspect_is_tested_again_with_machines_that_work() -> None:
    bad = {"m1", "m3"}
    found, rounds = carried_out(names(8), bad.isdisjoint)

    assert found == Pairs(machines=("m1", "m3"))
    assert rounds > 2
