"""Which step is backed up next, and which step goes to disk next."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.decisions.keep.next_copy import (
    is_due,
    next_disk_step,
    next_step_to_send,
    next_stride,
    roundness,
    stride_after,
)


def to_send(held: list[int], newest: int = -1, every: int = 1, stride: int = 1, resumed: int = -1) -> int | None:
    return next_step_to_send({0: held}, {0: newest}, every=every, stride=stride, resumed=resumed)


def test_a_machine_that_keeps_up_sends_every_step() -> None:
    sent = [-1]
    for step in range(1, 40):
        chosen = to_send([step - 1, step] if step > 1 else [step], sent[-1])
        assert chosen is not None
        sent.append(chosen)
    assert sent[1:] == list(range(1, 40))


def test_a_machine_that_is_three_steps_behind_sends_the_roundest() -> None:
    assert to_send([5, 6, 7], 4) == 6
    assert to_send([7, 8, 9], 6) == 8
    assert to_send([9, 11], 8) == 11, "of equally round steps, the newest one is sent"
    assert to_send([9, 10, 11], 11) is None


def test_only_multiples_and_the_first_step_of_the_generation_are_due() -> None:
    assert to_send([7, 8, 9], every=10) is None
    assert to_send([7, 8, 9], every=10, resumed=7) == 7, (
        "the first step of the generation is sent, since a new peer has nothing yet"
    )
    assert to_send([7, 10, 11], 7, every=10, resumed=7) == 10
    assert to_send([30, 40, 50], 20, every=10) == 40, "step 40 is the roundest, counted in multiples of 10"
    assert to_send([30, 40, 50], 20, every=10, stride=8) is None


def test_ranks_of_a_machine_send_the_same_step() -> None:
    def both(held: dict[int, list[int]], *sent: int) -> int | None:
        return next_step_to_send(held, dict(enumerate(sent)), every=1)

    assert both({0: [8, 9], 1: [8]}, 7, 7) == 8
    assert both({0: [8, 9], 1: [8]}, 8, 7) == 8, "rank 1 has not sent step 8 yet"
    assert both({0: [8, 9], 1: [8]}, 8, 8) == 9, "rank 1 will reach step 9"
    assert both({0: [8, 9], 1: [9, 10]}, 7, 7) == 10, "rank 1 does not hold step 8 any more"
    assert both({0: [3], 1: []}, -1, -1) == 3, "a rank without saves does not block the others"
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
    """Each machine needs these tenths of a step to send one step.

    All machines send the multiples of the largest stride.
    """
    last = 1_200

    def sent(tenths: int) -> list[int]:
        now, newest, stride, found = 0, -1, 1, []
        while now < 10 * last:
            step = now // 10
            chosen = to_send([step - 1, step], newest, stride=stride)
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
def test_the_chosen_step_is_held_newer_due_and_as_round_as_any(
    held: set[int], newest: int, every: int, resumed: int
) -> None:
    chosen = to_send(sorted(held), newest, every=every, resumed=resumed)
    due = {step for step in held if step > newest and (step % every == 0 or step == resumed)}
    assert (chosen is None) == (not due)
    if chosen is not None:
        assert chosen in due
        assert all(
            roundness(chosen // every) >= roundness(step // every)
            for step in due - {resumed}
            if chosen % every == 0 == step % every
        )


SLOTS = st.dictionaries(
    st.integers(0, 7), st.lists(st.integers(1, 60), max_size=3, unique=True).map(sorted), min_size=1, max_size=4
)


def to_write(held: dict[int, list[int]], **options: object) -> tuple[int | None, dict[int, str]]:
    arguments: dict[str, object] = {"every": 10, "stride": 1, "asked": (), "done": -1, **options}
    choice = next_disk_step(held, **arguments)  # type: ignore[arg-type]
    assert choice.reason
    return choice.step, dict(choice.gone)


def test_a_step_is_due_by_its_number_alone() -> None:
    assert [step for step in range(41) if is_due(step, 10)] == [10, 20, 30, 40]
    assert [step for step in range(41) if is_due(step, 10, 2)] == [20, 40]
    assert not any(is_due(step, 0) for step in range(41))


def test_a_write_begins_with_the_first_rank_and_waits_for_the_others() -> None:
    assert to_write({0: [18, 19, 20], 1: [17, 18, 19]}) == (20, {})
    assert to_write({0: [18, 19, 20], 1: []}) == (20, {})
    assert to_write({0: [17, 18, 19], 1: [17, 18, 19]}) == (None, {})


def test_a_step_that_one_rank_has_overwritten_is_dropped() -> None:
    assert to_write({0: [18, 19, 20], 1: [21, 22, 23]}) == (None, {})


def test_a_written_step_is_not_written_again() -> None:
    assert to_write({0: [18, 19, 20], 1: [18, 19, 20]}, done=20) == (None, {})


def test_a_requested_step_goes_first_and_regardless_of_the_stride() -> None:
    assert to_write({0: [28, 29, 30], 1: [28, 29, 30]}, asked=[29], stride=4) == (29, {})
    assert to_write({0: [28, 29, 30], 1: [28, 29, 30]}, asked=[31], every=0) == (None, {})


def test_a_requested_step_that_is_gone_is_dropped_with_the_reason() -> None:
    step, gone = to_write({0: [28, 29, 30], 1: [31, 32, 33]}, asked=[29], every=0)
    assert step is None
    assert gone == {29: "step 29 was requested, and rank 1, now at step 33, does not have it any more"}


@given(held=SLOTS, every=st.integers(0, 12), stride=st.sampled_from([1, 2, 4]), asked=st.sets(st.integers(1, 60)))
def test_only_a_step_that_no_rank_has_lost_is_chosen(
    held: dict[int, list[int]], every: int, stride: int, asked: set[int]
) -> None:
    choice = next_disk_step(held, every=every, stride=stride, asked=asked, done=-1)
    assert choice.step is None or choice.step in asked or is_due(choice.step, every, stride)
    for steps in held.values():
        assert choice.step is None or choice.step in steps or max(steps, default=-1) < choice.step
        assert all(step not in choice.gone for step in steps if all(step in other for other in held.values()))
    assert choice.step not in choice.gone


@given(every=st.integers(1, 50), first=st.integers(0, 500), second=st.integers(0, 500))
def test_a_slow_machine_writes_a_part_of_the_steps_of_a_faster_one(every: int, first: int, second: int) -> None:
    slow, fast = (stride_after(every, lasted) for lasted in sorted((first, second), reverse=True))
    steps = range(every * slow * 4)
    assert {step for step in steps if is_due(step, every, slow)} <= {s for s in steps if is_due(s, every, fast)}
    assert every * slow > max(first, second)
    assert slow == 1 or every * slow // 2 <= max(first, second)
