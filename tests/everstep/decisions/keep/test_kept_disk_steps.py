"""Which steps on its disk a machine keeps, what it reports of them, and what an agent knows after a restart."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.decisions.keep.kept_disk_steps import (
    OPEN_STEPS,
    Kept,
    agreed,
    steps_to_keep,
    went_back,
)
from tests.agent.checkpoints.tiers.tier_job import Machine, wait_for

STEPS = st.sets(st.integers(1, 40))


@pytest.fixture
def machine_of(tmp_path: Path) -> Iterator[Callable[..., Machine]]:
    made: list[Machine] = []

    def make(**options: Any) -> Machine:
        made.append(Machine(tmp_path, **{"ranks": (0,), "world": 2, **options}))
        return made[-1]

    yield make
    for machine in made:
        machine.close()


def test_requested_steps_are_kept_first_and_then_the_roundest() -> None:
    held = [8, 10, 12, 16, 20, 24, 30, 31]
    assert steps_to_keep(held, Kept(), newest=1) == {0, 16, 24, 31}
    assert steps_to_keep(held, Kept(named=10), newest=1) == {0, 10, 16, 31}
    assert steps_to_keep(held, Kept(settled=16, promised=20), newest=1) == {16, 20, 24, 31}
    assert steps_to_keep(held, Kept(gone=frozenset({16, 24})), newest=1) == {0, 8, 20, 31}


def test_a_promise_is_kept_until_it_is_settled_or_gone() -> None:
    held = [10, 20, 30]
    first = agreed(Kept(), held, keep=10, settled=0, gone=())
    assert first.promised == 10
    assert agreed(first, held, keep=20, settled=0, gone=()) == first
    assert agreed(first, held, keep=20, settled=0, gone=(10,)).promised == 20
    settled = agreed(first, held, keep=10, settled=10, gone=())
    assert (settled.settled, settled.promised) == (10, 10)
    assert agreed(settled, held, keep=20, settled=10, gone=()).promised == 20
    assert agreed(settled, held, keep=5, settled=5, gone=()) == settled, "this message is old, so it changes nothing"
    assert agreed(Kept(), held, keep=40, settled=40, gone=()) == Kept(), "the machine does not have step 40"


@given(held=STEPS, settled=st.integers(0, 40), promised=st.integers(0, 40), gone=STEPS, newest=st.integers(1, 3))
def test_kept_steps_fit_the_room(held: set[int], settled: int, promised: int, gone: set[int], newest: int) -> None:
    kept = Kept(settled, promised, gone=frozenset(gone))
    keep = steps_to_keep(held, kept, newest=newest)
    assert keep >= {settled, promised, *sorted(held)[-newest:]}
    assert len(keep) <= newest + OPEN_STEPS + 2


def test_a_job_that_rolls_back_forgets_the_abandoned_steps() -> None:
    kept = Kept(20, 30, named=40, gone=frozenset({10}), passed=40)
    assert went_back(kept, 30) == Kept(20, 30)
    assert went_back(kept, 25) == Kept(20, 20)
    assert went_back(kept, -1) == Kept()


def on_disk(machine: Machine, *steps: int) -> None:
    for step in steps:
        machine.save(step)
        wait_for(partial(_has, machine, step), f"step {step} on disk")


def _has(machine: Machine, step: int) -> bool:
    return step in machine.saved.of(0).disk_steps


def test_an_agent_that_was_restarted_keeps_what_it_promised(machine_of: Callable[..., Machine]) -> None:
    machine = machine_of(disk_keep=1)
    machine.launch()
    on_disk(machine, 10)
    machine.persist(whole=10, generation=1)
    assert machine.saved.of(0).disk_kept == 10
    machine.tiers.close()
    machine.tiers = machine.made()
    machine.saved.clear()
    machine.tiers.open(machine.launch_options())
    assert (list(machine.saved.of(0).disk_steps), machine.saved.of(0).disk_kept) == ([10], 10)
    on_disk(machine, 20, 30, 40, 50, 60)
    machine.persist(whole=60, generation=1)
    assert machine.saved.of(0).disk_kept == 10, "step 10 is neither settled nor gone"
    assert 10 in machine.steps()[0]
    machine.persist(whole=60, settled=10, generation=1)
    machine.persist(whole=60, settled=60, generation=1)
    on_disk(machine, 70, 80)
    wait_for(lambda: machine.steps() == {0: [60, 70, 80]}, "steps older than the settled step are deleted")
    assert list(machine.saved.of(0).disk_steps) == [60, 70, 80]


def test_a_message_about_a_stopped_generation_is_ignored(machine_of: Callable[..., Machine]) -> None:
    machine = machine_of()
    machine.launch()
    on_disk(machine, 10, 20)
    machine.persist(whole=20, settled=10, generation=1)
    machine.tiers.shut()
    machine.launch(generation=2, resume_step=10)
    on_disk(machine, 20)
    machine.persist(30, whole=20, settled=20, generation=1)
    now = machine.saved.of(0)
    assert (now.disk_kept, now.disk_settled, now.disk_wanted) == (10, 10, -1)


def test_a_requested_step_replaces_one_that_is_due(machine_of: Callable[..., Machine]) -> None:
    machine = machine_of(ranks=(0, 1), world=4)
    machine.launch()
    machine.save(10, ranks=(0,))  # rank 1 does not reach step 10
    machine.persist(12, generation=1)
    machine.save(12)
    wait_for(partial(_has, machine, 12), "step 12 on disk")
    assert machine.problem() == ""
    now = machine.saved.of(0)
    assert (list(now.disk_steps), now.disk_passed) == ([12], 12)
