"""After how many steps one rank can save without a wait."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from everstep.decisions.keep.save_need import FAST_SAVES, ROOM, SLOW_SAVES, STEPS, SaveNeed, distance

SECONDS = st.floats(0.001, 1000)


def need(*saves: float, wanted: int = 1, step_s: float = 1.0) -> SaveNeed:
    found = SaveNeed(wanted)
    for save_s in saves:
        found.observe_step(step_s)
        found.observe_save(save_s)
    return found


@given(SECONDS, SECONDS)
def test_a_save_ends_within_the_distance_and_not_within_half_of_it(save_s: float, step_s: float) -> None:
    steps = distance(save_s, step_s)
    assert steps.bit_count() == 1
    assert save_s <= steps * step_s or steps == 1 << 20
    assert steps == 1 or steps // 2 * step_s < save_s


def test_slow_saves_in_a_row_make_it_rise_at_once() -> None:
    assert need(*[5.0] * (SLOW_SAVES - 1)).wanted == 1
    assert need(*[5.0] * SLOW_SAVES).wanted == 8


def test_slow_saves_between_fast_ones_change_nothing() -> None:
    assert need(*[5.0, 5.0, 0.5] * FAST_SAVES).wanted == 1


def test_it_falls_only_after_many_saves() -> None:
    assert need(*[1.2] * (FAST_SAVES - 1), wanted=8).wanted == 8
    assert need(*[1.2] * FAST_SAVES, wanted=8).wanted == 2


def test_a_save_that_just_fits_does_not_make_it_fall() -> None:
    assert need(*[0.9] * 100, wanted=2).wanted == 2


def test_before_a_step_is_measured_it_stays() -> None:
    found = SaveNeed(4)
    for _ in range(100):
        found.observe_save(50.0)
    assert (found.wanted, found.step_s) == (4, 0.0)


def test_one_long_step_does_not_count() -> None:
    found = SaveNeed()
    for step_s in [60.0, *[1.0] * STEPS]:
        found.observe_step(step_s)
    assert found.step_s == 1.0


@given(st.integers(0, 10).map(lambda power: 1 << power), SECONDS, st.lists(st.floats(1, ROOM), min_size=60))
def test_noise_makes_it_rise_or_fall_but_not_both(wanted: int, save_s: float, noise: list[float]) -> None:
    found, before, directions = SaveNeed(wanted), wanted, set()
    for factor in noise:
        found.observe_step(1.0)
        found.observe_save(save_s * factor)
        if found.wanted != before:
            directions.add(found.wanted > before)
        before = found.wanted
    assert len(directions) < 2
    assert len({found.wanted, wanted}) == 1 or found.wanted <= distance(ROOM * ROOM * save_s, 1.0)


@given(st.lists(SECONDS, min_size=1), st.lists(SECONDS, min_size=1))
def test_a_rank_with_slower_saves_never_wants_a_smaller_distance(steps: list[float], saves: list[float]) -> None:
    fast, slow = SaveNeed(), SaveNeed()
    for number, save_s in enumerate(saves):
        for found, factor in ((fast, 1.0), (slow, 2.0)):
            found.observe_step(steps[number % len(steps)])
            found.observe_save(factor * save_s)
    assert slow.wanted >= fast.wanted
