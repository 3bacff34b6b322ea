"""Disk checkpoints by time: all machines get a request for the same coming step. And which steps all of them keep."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from everstep.decisions.keep.disk_schedule import (
    AGAIN_S,
    LEAD_S,
    LEAST_AHEAD,
    Agreed,
    DiskProgress,
    PersistRule,
    StepsOnDisk,
    agree,
    coming_step,
    newest_of_all,
)
from everstep.model.checkpoint_policy import CheckpointPolicy

S = 10**9
MINUTE = 60 * S
NOW = 1000 * MINUTE


def rule(**options: object) -> PersistRule:
    return PersistRule(CheckpointPolicy.model_validate({"disk_every_min": 15.0, **options}))


def ranks(
    steps: int, *, age_s: float = 0.0, lived_s: float = 0.0, wanted: int | tuple[int, int] = -1, whole: int = 0
) -> tuple[list[DiskProgress], int]:
    both = wanted if isinstance(wanted, tuple) else (wanted, wanted)
    return [DiskProgress(rank, steps - rank, whole or -1, age_s, lived_s, both[rank]) for rank in range(2)], whole


def looked_at(one: PersistRule, now_ns: int, steps: int, **shown: Any) -> PersistRule:
    """Return the rule after an observation ten steps and ten seconds earlier, when no step was due yet."""
    assert one.observe(*ranks(steps - 10, **shown), now_ns - 10 * S) is None
    return one


def test_the_coming_step_is_requested_when_the_time_is_up() -> None:
    first: dict[str, Any] = {"lived_s": 14 * 60 + 50}

    assert looked_at(rule(), NOW, 100, **first).observe(*ranks(100), NOW - 1) is None
    assert looked_at(rule(), NOW, 100, **first).observe(*ranks(100), NOW) == 104


def test_time_counts_from_the_newest_step_that_all_have_on_disk() -> None:
    one = looked_at(rule(), NOW, 100, whole=64, age_s=60.0, lived_s=9000.0)

    assert one.observe(*ranks(100, whole=64), NOW + 13 * MINUTE + 49 * S) is None
    assert one.observe(*ranks(100, whole=64), NOW + 13 * MINUTE + 50 * S) is not None


def test_a_step_that_one_machine_has_does_not_count() -> None:
    one = looked_at(rule(), NOW, 100, whole=64, age_s=14 * 60.0)
    alone, _ = ranks(200, whole=192)

    assert one.observe(alone, 64, NOW + 2 * MINUTE) is not None


def test_only_a_later_step_restarts_the_time() -> None:
    one = looked_at(rule(), NOW, 100, whole=64, age_s=14 * 60.0)

    assert one.observe(*ranks(110, whole=96, age_s=5.0), NOW) is None
    assert one.observe(*ranks(120, whole=64, age_s=5.0), NOW + 14 * MINUTE) is None
    assert one.observe(*ranks(130, whole=64, age_s=5.0), NOW + 15 * MINUTE) is not None


def test_a_generation_continues_the_time_of_the_one_before() -> None:
    before = looked_at(rule(), NOW, 200, whole=128, age_s=10 * 60.0)
    one = looked_at(before.next(), NOW + 4 * MINUTE, 100, whole=64, age_s=20 * 60.0)

    assert one.observe(*ranks(100, whole=64), NOW + 4 * MINUTE) is None
    assert one.observe(*ranks(110, whole=64), NOW + 6 * MINUTE) is not None
    assert one.observe(*ranks(130, whole=96, age_s=10.0), NOW + 8 * MINUTE) is None, (
        "step 96 is later than step 64, so the time starts again"
    )


def test_no_other_step_is_requested_while_one_is_wanted() -> None:
    old: dict[str, Any] = {"lived_s": 9000.0}

    assert looked_at(rule(), NOW, 100, **old).observe(*ranks(100, wanted=104), NOW) is None
    assert looked_at(rule(), NOW, 100, **old).observe(*ranks(100, wanted=99), NOW) is None, (
        "the requested step is being written"
    )


def test_a_coming_step_that_one_machine_does_not_know_is_requested_again() -> None:
    old: dict[str, Any] = {"lived_s": 9000.0}

    assert looked_at(rule(), NOW, 100, **old).observe(*ranks(100, wanted=(104, -1)), NOW) == 104
    assert looked_at(rule(), NOW, 104, **old).observe(*ranks(104, wanted=(104, -1)), NOW) is None


def test_a_failing_disk_gets_requests_less_and_less_often() -> None:
    one = looked_at(rule(), NOW, 100, lived_s=9000.0)
    asked = [second for second in range(3600) if one.observe(*ranks(100 + second), NOW + second * S) is not None]

    waits = [after - before for before, after in pairwise(asked)]
    assert waits == [AGAIN_S, 2 * AGAIN_S, 4 * AGAIN_S, 8 * AGAIN_S, 15 * 60, 15 * 60]


def test_more_than_one_step_a_minute_can_be_set() -> None:
    one = PersistRule(CheckpointPolicy(disk_every_min=0.1))
    asked = [
        one.observe(*ranks(second + 1, whole=second // 10 * 10, age_s=second % 10), NOW + second * S)
        for second in range(60)
    ]

    assert len([step for step in asked if step is not None]) >= 5


def test_where_steps_are_due_by_number_one_is_requested_if_none_gets_onto_all_disks() -> None:
    by_number: dict[str, Any] = {"disk_every_min": 0.0, "disk_every_steps": 50}
    asked = {
        newest: looked_at(rule(**by_number), NOW, newest, lived_s=9000.0).observe(*ranks(newest), NOW)
        for newest in (99, 115)
    }

    assert asked[99] is None, "only one step was due by its number so far"
    assert asked[115] == 150, "the requested step is also due by its number"


def test_without_a_step_time_or_an_interval_no_step_is_requested() -> None:
    old: dict[str, Any] = {"lived_s": 9000.0}

    assert rule().observe(*ranks(100, **old), NOW) is None, "no step time is known before the first step"
    for options in ({"disk": False}, {"disk_every_min": 0.0}):
        assert looked_at(rule(**options), NOW, 100, **old).observe(*ranks(100), NOW) is None
    assert rule().observe([], 0, NOW) is None
    assert looked_at(rule(), NOW, 10, **old).observe(*ranks(0), NOW) is None


@given(st.integers(0, 10**6), st.floats(1e-4, 1e3))
def test_the_step_comes_late_enough_and_not_too_late(newest: int, step_s: float) -> None:
    ahead = coming_step(newest, step_s) - newest

    assert ahead >= LEAST_AHEAD
    assert ahead * step_s >= LEAD_S * (1 - 1e-9)
    assert ahead < 3 * max(LEAD_S / step_s + 1, LEAST_AHEAD)


@given(st.integers(0, 10**6), st.floats(1e-3, 1e2), st.data())
def test_watchers_that_observe_a_little_apart_mostly_name_the_same_step(
    newest: int, step_s: float, data: st.DataObject
) -> None:
    """Watchers that begin within one interval of the grid give at most two different answers."""
    draw: Callable[[st.SearchStrategy[int]], int] = data.draw
    start = newest + draw(st.integers(0, 100))
    first = coming_step(start, step_s)
    raster = coming_step(first, step_s) - first
    answers = {coming_step(start + delay, step_s) for delay in range(min(raster, 50))}

    assert len(answers) <= 2


def stored(*steps: int, passed: int = 0, kept: int = 0, settled: int = 0) -> StepsOnDisk:
    return StepsOnDisk(frozenset(steps), passed, kept, settled)


def test_the_newest_common_step_need_not_be_the_newest_of_any_rank() -> None:
    disks = [stored(10, 20, 40), stored(20, 30)]
    assert newest_of_all(disks) == 20
    assert agree(disks, 2) == Agreed(keep=20)
    assert newest_of_all([]) == 0


def test_a_part_of_the_ranks_agrees_on_no_step() -> None:
    assert agree([stored(10, passed=20)], 2) == Agreed()


def test_a_step_is_settled_when_all_keep_it() -> None:
    one, other = stored(10, kept=10), stored(10, 20)
    assert agree([one, other], 2) == Agreed(keep=10)
    assert agree([one, stored(10, 20, kept=10)], 2) == Agreed(keep=10, settled=10)
    assert agree([one, stored(20, kept=10)], 2).settled == 0, "the other machine promised to keep step 10, but lost it"
    assert agree([one, stored(20, kept=20, settled=20)], 2).settled == 20, (
        "another watcher had already seen that step 20 is settled"
    )


def test_a_step_that_some_keep_is_named_until_it_is_settled_or_gone() -> None:
    some = [stored(10, 20, kept=10), stored(10, 20)]
    assert agree(some, 2) == Agreed(keep=10), "step 10 is named first, and step 20 after it"
    gone = [stored(10, 20, kept=10), stored(20, passed=20)]
    assert agree(gone, 2) == Agreed(keep=20, gone=(10,))


def test_a_step_is_gone_when_a_rank_passed_it() -> None:
    assert agree([stored(10, 20, 30), stored(passed=20)], 2).gone == (10, 20)
    assert agree([stored(10, 20, 30), stored(10)], 2).gone == (), (
        "an agent of an older release does not report which steps it passed"
    )
