"""The waits between repeated attempts."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from everstep.base.backoff import Backoff


@given(st.floats(0.001, 10), st.floats(0.001, 10), st.integers(1, 40))
def test_waits_grow_up_to_a_limit(first_s: float, most_s: float, tries: int) -> None:
    backoff = Backoff(first_s, most_s, jitter=0)
    waits = [backoff.next_s() for _ in range(tries)]

    assert waits[0] == min(first_s, most_s)
    assert all(after in {2 * before, most_s} for before, after in pairwise(waits))
    assert max(waits) <= most_s


@given(st.integers(0, 40))
def test_a_success_resets_the_wait(tries: int) -> None:
    backoff = Backoff(0.2, 3.0, jitter=0)
    for _ in range(tries):
        backoff.next_s()
    backoff.reset()
    assert backoff.next_s() == 0.2


@given(st.integers(0, 40))
def test_a_try_that_lasted_longer_than_the_limit_counts_as_a_success(tries: int) -> None:
    backoff = Backoff(0.2, 3.0, jitter=0)
    for _ in range(tries):
        backoff.next_s(lasted_s=3.0)
    assert backoff.next_s(lasted_s=3.1) == 0.2


def test_waits_are_spread_at_random() -> None:
    waits = {Backoff(0.2, 3.0).next_s() for _ in range(100)}

    assert len(waits) > 90
    assert all(0.1 <= wait <= 0.2 for wait in waits)
