"""What a rung is expected to save, and how probable it is that failures have one place only by chance."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.decisions.act.ladder.worth import (
    COSTS,
    HORIZON_S,
    LIKELY,
    chance_of,
    likely,
    saving_s,
    trains_well,
    updated,
)
from everstep.decisions.blame.classify.rule import FaultClass
from everstep.model.finding import Owner
from everstep.model.ladder import Rung

SHARE = st.floats(0.001, 0.999)
SECONDS = st.floats(1, 1e6)


def test_the_owner_counts_before_the_class() -> None:
    assert likely(Owner.MACHINE, FaultClass.KILLED) == LIKELY[Owner.MACHINE]
    assert likely(Owner.UNKNOWN, FaultClass.KILLED) == LIKELY[FaultClass.KILLED]
    assert LIKELY[FaultClass.KILLED] < likely("", "") < LIKELY[FaultClass.CUDA_ERROR]


@given(SHARE, SECONDS, SECONDS)
def test_what_returns_sooner_is_worth_more(probability: float, gain_s: float, restart_s: float) -> None:
    assert saving_s(probability, gain_s, restart_s) >= saving_s(probability, 2 * gain_s, restart_s)
    assert saving_s(probability, gain_s, restart_s) <= saving_s(1.0, gain_s, restart_s)


def test_a_fault_that_is_found_saves_the_restarts_of_a_day() -> None:
    assert saving_s(1.0, 3600.0, 30.0) == pytest.approx(30.0 * HORIZON_S / 3600.0)
    assert saving_s(1.0, 0.0, 30.0) == pytest.approx(30.0 * HORIZON_S), (
        "without the rung, the job fails again immediately after each restart"
    )


@pytest.mark.parametrize(
    ("earlier", "machine", "step", "machines", "chance"),
    [
        ([], "m1", 5, 8, 1.0),
        ([("m2", 7)], "m1", 5, 8, 1.0),
        ([("m1", 7)], "m1", 5, 8, 1 / 8),
        ([("m1", 7), ("m1", 9)], "m1", 5, 8, 1 / 64),
        ([("m1", 7), ("m2", 9), ("m3", 11)], "m1", 5, 8, 3 / 8),
        ([("m1", 5)], "m1", 5, 8, 0.001 / 8),
        ([("m1", -1)], "m1", -1, 8, 1 / 8),
        ([("", 7)], "", 5, 8, 1.0),
        ([("m1", 7)], "m1", 5, 1, 1.0),
    ],
)
def test_the_chance_of_one_place(
    earlier: list[tuple[str, int]], machine: str, step: int, machines: int, chance: float
) -> None:
    assert chance_of(earlier, machine, step, machines) == pytest.approx(chance)


@given(
    st.lists(st.tuples(st.sampled_from(["", "m0", "m1", "m2"]), st.integers(-1, 3)), max_size=20),
    st.sampled_from(["", "m0", "m1"]),
    st.integers(-1, 3),
    st.integers(1, 1000),
)
def test_a_chance_is_a_probability(earlier: list[tuple[str, int]], machine: str, step: int, machines: int) -> None:
    assert 0.0 <= chance_of(earlier, machine, step, machines) <= 1.0


@given(SHARE, st.floats(0, 1))
def test_failures_at_one_place_make_a_machine_more_likely(probability: float, chance: float) -> None:
    assert probability * 0.999 <= updated(probability, chance) <= 1.0
    assert updated(probability, 1.0) == pytest.approx(probability)


def test_a_job_trains_well_for_95_percent_of_its_time() -> None:
    assert trains_well(600.0, 30.0)
    assert not trains_well(599.0, 30.0)
    assert not trains_well(None, 30.0)
    assert not trains_well(600.0, 0.0), "the cost of a restart is not known"


def test_only_rungs_that_cost_minutes_have_a_price() -> None:
    assert set(COSTS) == {Rung.DIAGNOSE, Rung.REPLAY}
