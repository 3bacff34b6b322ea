"""Which steps go to disk: laws, and the cases that are easily got wrong."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from everstep.decisions.keep.next_copy import is_due, next_disk_step, stride_after

SLOTS = st.dictionaries(
    st.integers(0, 7), st.lists(st.integers(1, 60), max_size=3, unique=True).map(sorted), min_size=1, max_size=4
)


def choose(held: dict[int, list[int]], **options: object) -> tuple[int | None, dict[int, str]]:
    arguments: dict[str, object] = {"every": 10, "stride": 1, "asked": (), "done": -1, **options}
    choice = next_disk_step(held, **arguments)  # type: ignore[arg-type]
    assert choice.reason
    return choice.step, dict(choice.gone)


def test_a_step_is_due_by_its_number_alone() -> None:
    assert [step for step in range(41) if is_due(step, 10)] == [10, 20, 30, 40]
    assert [step for step in range(41) if is_due(step, 10, 2)] == [20, 40]
    assert not any(is_due(step, 0) for step in range(41))


def test_a_step_begins_with_the_first_rank_and_waits_for_the_others() -> None:
    assert choose({0: [18, 19, 20], 1: [17, 18, 19]}) == (20, {})
    assert choose({0: [18, 19, 20], 1: []}) == (20, {})
    assert choose({0: [17, 18, 19], 1: [17, 18, 19]}) == (None, {})


def test_a_step_that_one_rank_has_overwritten_is_let_go() -> None:
    assert choose({0: [18, 19, 20], 1: [21, 22, 23]}) == (None, {})


def test_what_is_done_is_not_done_again() -> None:
    assert choose({0: [18, 19, 20], 1: [18, 19, 20]}, done=20) == (None, {})


def test_an_asked_step_goes_first_and_regardless_of_the_stride() -> None:
    assert choose({0: [28, 29, 30], 1: [28, 29, 30]}, asked=[29], stride=4) == (29, {})
    assert choose({0: [28, 29, 30], 1: [28, 29, 30]}, asked=[31], every=0) == (None, {})


def test_an_asked_step_that_is_gone_is_dropped_with_the_reason() -> None:
    step, gone = choose({0: [28, 29, 30], 1: [31, 32, 33]}, asked=[29], every=0)
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
def test_a_slow_machine_writes_a_part_of_what_a_faster_one_does(every: int, first: int, second: int) -> None:
    slow, fast = (stride_after(every, lasted) for lasted in sorted((first, second), reverse=True))
    steps = range(every * slow * 4)
    assert {step for step in steps if is_due(step, every, slow)} <= {s for s in steps if is_due(s, every, fast)}
    assert every * slow > max(first, second)
    assert slow == 1 or every * slow // 2 <= max(first, second)
