"""Disk checkpoints by time: all machines are asked for the same coming step, in time and not twice."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from everstep.checkpoint_policy import CheckpointPolicy
from everstep.decisions.pace import LEAST_AHEAD
from everstep.decisions.persist import AGAIN_S, LEAD_S, OnDisk, PersistRule, coming_step

S = 10**9
MINUTE = 60 * S
BEGAN = 1000 * MINUTE


def rule(**options: object) -> PersistRule:
    return PersistRule(CheckpointPolicy.model_validate({"disk_every_min": 15.0, **options}), began_ns=BEGAN)


def ranks(steps: int, *, disk_ns: int = 0, wanted: int | tuple[int, int] = -1) -> list[OnDisk]:
    both = wanted if isinstance(wanted, tuple) else (wanted, wanted)
    return [OnDisk(rank, steps - rank, disk_ns, both[rank]) for rank in range(2)]


def looked_at(one: PersistRule, now_ns: int, steps: int) -> PersistRule:
    """After a look ten steps and ten seconds earlier, at which nothing was due."""
    assert one.observe(ranks(steps - 10, disk_ns=now_ns - 10 * S), now_ns - 10 * S) is None
    return one


def test_the_coming_step_is_asked_for_when_the_time_is_up() -> None:
    due = BEGAN + 15 * MINUTE

    assert looked_at(rule(), due - 1, 100).observe(ranks(100), due - 1) is None
    assert looked_at(rule(), due, 100).observe(ranks(100), due) == 104


def test_time_counts_from_the_newest_disk_checkpoint() -> None:
    disk_ns = BEGAN + 20 * MINUTE

    assert looked_at(rule(), BEGAN + 34 * MINUTE, 100).observe(ranks(100, disk_ns=disk_ns), BEGAN + 34 * MINUTE) is None
    assert looked_at(rule(), BEGAN + 35 * MINUTE, 100).observe(ranks(100, disk_ns=disk_ns), BEGAN + 35 * MINUTE) == 104


def test_nothing_else_is_asked_for_while_a_step_is_wanted() -> None:
    due = BEGAN + 16 * MINUTE

    assert looked_at(rule(), due, 100).observe(ranks(100, wanted=104), due) is None
    assert looked_at(rule(), due, 100).observe(ranks(100, wanted=99), due) is None, "it is being written"


def test_a_step_that_one_machine_does_not_know_of_is_asked_for_again_while_it_is_to_come() -> None:
    due = BEGAN + 16 * MINUTE

    assert looked_at(rule(), due, 100).observe(ranks(100, wanted=(104, -1)), due) == 104
    assert looked_at(rule(), due, 104).observe(ranks(104, wanted=(104, -1)), due) is None


def test_a_disk_that_does_not_work_is_not_asked_all_the_time() -> None:
    due = BEGAN + 16 * MINUTE
    one = looked_at(rule(), due, 100)

    assert one.observe(ranks(100), due) is not None
    assert one.observe(ranks(130), due + 30 * S) is None
    assert one.observe(ranks(170), due + round(AGAIN_S * S)) is not None


def test_a_wish_for_more_than_one_a_minute_is_granted() -> None:
    one = PersistRule(CheckpointPolicy(disk_every_min=0.1), BEGAN)
    asked = [
        one.observe(ranks(second + 1, disk_ns=BEGAN + second // 10 * 10 * S), BEGAN + second * S)
        for second in range(60)
    ]

    assert len([step for step in asked if step is not None]) >= 5


def test_without_a_step_time_or_a_wish_for_it_nothing_is_asked() -> None:
    due = BEGAN + 16 * MINUTE

    assert rule().observe(ranks(100), due) is None, "no step was seen yet"
    for options in ({"disk": False}, {"disk_every_min": 0.0}):
        assert looked_at(rule(**options), due, 100).observe(ranks(100), due) is None
    assert rule().observe([], due) is None
    assert looked_at(rule(), due, 10).observe(ranks(0), due) is None


@given(st.integers(0, 10**6), st.floats(1e-4, 1e3))
def test_the_step_comes_late_enough_and_not_too_late(newest: int, step_s: float) -> None:
    ahead = coming_step(newest, step_s) - newest

    assert ahead >= LEAST_AHEAD
    assert ahead * step_s >= LEAD_S * (1 - 1e-9)
    assert ahead < 3 * max(LEAD_S / step_s + 1, LEAST_AHEAD)


@given(st.integers(0, 10**6), st.floats(1e-3, 1e2), st.data())
def test_watchers_that_look_a_little_apart_mostly_name_the_same_step(
    newest: int, step_s: float, data: st.DataObject
) -> None:
    """Over one raster of beginnings, a delay of a step changes the answer once."""
    draw: Callable[[st.SearchStrategy[int]], int] = data.draw
    start = newest + draw(st.integers(0, 100))
    first = coming_step(start, step_s)
    raster = coming_step(first, step_s) - first
    answers = {coming_step(start + delay, step_s) for delay in range(min(raster, 50))}

    assert len(answers) <= 2
