"""Which step is backed up next."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.decisions.keep.next_copy import next_step_to_send, next_stride, roundness


def choose(held: list[int], newest: int = -1, every: int = 1, stride: int = 1, resumed: int = -1) -> int | None:
    return next_step_to_send({0: held}, {0: newest}, every=every, stride=stride, resumed=resumed)


def test_who_keeps_up_sends_every_step() -> None:
    sent = [-1]
    for step in range(1, 40):
        chosen = choose([step - 1, step] if step > 1 else [step], sent[-1])
        assert chosen is not None
        sent.append(chosen)
    assert sent[1:] == list(range(1, 40))


def test_who_is_behind_by_three_steps_sends_the_roundest() -> None:
    assert choose([5, 6, 7], 4) == 6
    assert choose([7, 8, 9], 6) == 8
    assert choose([9, 11], 8) == 11, "the newest of equals"
    assert choose([9, 10, 11], 11) is None


def test_only_multiples_count_and_where_the_generation_began() -> None:
    assert choose([7, 8, 9], every=10) is None
    assert choose([7, 8, 9], every=10, resumed=7) == 7, "a new peer has nothing yet"
    assert choose([7, 10, 11], 7, every=10, resumed=7) == 10
    assert choose([30, 40, 50], 20, every=10) == 40, "roundness counts in multiples"
    assert choose([30, 40, 50], 20, every=10, stride=8) is None


def test_ranks_of_a_machine_send_the_same_step() -> None:
    def both(held: dict[int, list[int]], *sent: int) -> int | None:
        return next_step_to_send(held, dict(enumerate(sent)), every=1)

    assert both({0: [8, 9], 1: [8]}, 7, 7) == 8
    assert both({0: [8, 9], 1: [8]}, 8, 7) == 8, "rank 1 has it still to send"
    assert both({0: [8, 9], 1: [8]}, 8, 8) == 9, "rank 1 is going to reach it"
    assert both({0: [8, 9], 1: [9, 10]}, 7, 7) == 10, "rank 1 holds 8 no more"
    assert both({0: [3], 1: []}, -1, -1) == 3, "who saves nothing does not hold up the others"
    assert both({0: [3], 1: []}, 3, -1) is None


def test_the_stride_grows_by_doubling_and_shrinks_at_once() -> None:
    stride, seen = 1, []
    for lasted in (0, 50, 50, 50, 3, 0):
        stride = next_stride(stride, 1, lasted)
        seen.append(stride)
    assert seen == [1, 2, 4, 8, 4, 1]
    assert next_stride(4, 10, 9) == 1


@settings(max_examples=20)
@given(st.lists(st.integers(1, 70), min_size=2, max_size=6))
def test_machines_that_are_behind_by_different_amounts_meet(takes: list[int]) -> None:
    """Tenths of a step that each machine needs to send one; all of them send the multiples of the largest stride."""
    last = 1_200

    def sent(tenths: int) -> list[int]:
        now, newest, stride, found = 0, -1, 1, []
        while now < 10 * last:
            step = now // 10
            chosen = choose([step - 1, step], newest, stride=stride)
            if chosen is None:
                now += 1
                continue
            now += tenths
            newest, stride = chosen, next_stride(stride, 1, now // 10 - chosen)
            found.append(chosen)
        return [step for step in found if 200 < step < last - 200]

    every = [sent(tenths) for tenths in takes]
    largest = max(b - a for steps in every for a, b in itertools.pairwise(steps))
    meeting = set.intersection(*map(set, every))
    assert len(meeting) >= (last - 400) // (4 * largest)


@given(
    st.sets(st.integers(0, 10_000), max_size=8), st.integers(-1, 10_000), st.integers(1, 12), st.integers(-1, 10_000)
)
def test_what_is_chosen_is_held_newer_due_and_as_round_as_any(
    held: set[int], newest: int, every: int, resumed: int
) -> None:
    chosen = choose(sorted(held), newest, every=every, resumed=resumed)
    due = {step for step in held if step > newest and (step % every == 0 or step == resumed)}
    assert (chosen is None) == (not due)
    if chosen is not None:
        assert chosen in due
        assert all(
            roundness(chosen // every) >= roundness(step // every)
            for step in due - {resumed}
            if chosen % every == 0 == step % every
        )
