"""A set of ranks equals Python's set, whatever is done with it, and is read back as it was written."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from everstep.model.ranks import NO_RANKS, Ranks, members, text_of

SETS = st.sets(st.integers(0, 40))
JSON = TypeAdapter(Ranks)


@given(SETS, SETS)
def test_it_does_what_a_set_does(one: set[int], other: set[int]) -> None:
    first, second = Ranks.of(one), Ranks.of(other)

    assert [*(first | second)] == sorted(one | other)
    assert [*(first & second)] == sorted(one & other)
    assert [*(first - second)] == sorted(one - other)
    assert (first <= second) == (one <= other)
    assert (first == second) == (one == other)
    assert (len(first), bool(first), first.first) == (len(one), bool(one), min(one, default=-1))
    assert all((rank in first) == (rank in one) for rank in range(-1, 42))


@given(SETS)
def test_it_is_read_as_it_was_written(ranks: set[int]) -> None:
    written = Ranks.of(ranks)

    assert JSON.validate_json(JSON.dump_json(written)) == written
    assert Ranks.parse(text_of(ranks)) == written
    assert str(written) == text_of(ranks)
    assert members(str(written)) == ranks


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9)), max_size=8))
def test_runs_may_overlap_and_be_in_any_order(runs: list[tuple[int, int]]) -> None:
    found = Ranks.of_spans((first, first + more) for first, more in runs)

    assert {*found} == {rank for first, more in runs for rank in range(first, first + more + 1)}


def test_a_whole_job_is_a_short_text() -> None:
    assert str(Ranks.of(range(80_000))) == "0-79999"
    assert str(NO_RANKS) == ""


@pytest.mark.parametrize("text", ["a", "1-", "-1", "1,,2", "1 2", ",1"])
def test_another_text_is_refused_with_the_form_that_is_wanted(text: str) -> None:
    with pytest.raises(ValidationError, match="write it as 0-7,16"):
        JSON.validate_python(text)
