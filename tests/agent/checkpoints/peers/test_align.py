"""Machines whose backups lag by different amounts still have a step in common after one machine is lost."""

from __future__ import annotations

import random
from functools import partial
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.checkpoints.peers.align import apply, kept, lost, pending, pins, remember
from agent.checkpoints.saved_state import NONE
from agent.v1 import agent_pb2 as pb
from tests.agent.checkpoints.peers.aligned_job import Job


def state(**fields: int) -> pb.SavedState:
    return pb.SavedState(**(NONE | fields))


def align(named: int, *, whole: int = 0, settled: int = 0) -> pb.AlignBackupsRequest:
    return pb.AlignBackupsRequest(named=named, whole=whole, settled=settled)


def test_only_a_coming_step_is_adopted() -> None:
    for own, adopted in ((9, 10), (10, 0), (-1, 0)):
        rank = state(own_step=own, backup_step=5)
        apply(rank, align(10))
        assert rank.backup_named == adopted


def test_a_complete_step_does_not_count_for_a_rank_that_was_not_aligned_on_it() -> None:
    rank = state(own_step=9, backup_step=5)
    apply(rank, align(10, whole=3))
    apply(rank, align(10, whole=3))
    assert (rank.backup_named, rank.backup_whole) == (10, 0), (
        "the rank was not aligned on step 3, so it may have overwritten step 3"
    )
    rank.backup_step = 10
    apply(rank, align(20, whole=10, settled=10))
    apply(rank, align(20, whole=3, settled=10))
    assert (rank.backup_named, rank.backup_whole) == (20, 10)


def test_a_backed_up_named_step_is_kept_until_it_is_settled() -> None:
    rank = state(own_step=12, backup_step=10, backup_named=10, backup_whole=4)
    apply(rank, align(20, whole=4, settled=9))
    apply(rank, align(0, settled=9))
    assert (rank.backup_named, pending(rank)) == (10, 0)
    apply(rank, align(20, whole=10, settled=10))
    assert (rank.backup_named, rank.backup_whole, pending(rank)) == (20, 10, 20)


def test_a_named_step_without_a_backup_is_replaced_only_by_a_later_one() -> None:
    rank = state(own_step=12, backup_step=10, backup_named=20)
    apply(rank, align(15, settled=14))
    assert rank.backup_named == 20
    apply(rank, align(25, settled=14))
    assert rank.backup_named == 25
    apply(rank, align(0, settled=23))
    assert rank.backup_named == 25
    apply(rank, align(0, settled=25))
    assert rank.backup_named == 0


@pytest.mark.parametrize(("fields", "freed"), [({}, True), ({"backup_whole": 4}, False), ({"backup_step": 25}, False)])
def test_a_named_step_that_was_not_reached_is_given_up_unless_something_is_kept(
    fields: dict[str, int], freed: bool
) -> None:
    rank = state(**({"own_step": 12, "backup_step": 10, "backup_named": 25} | fields))
    apply(rank, align(0, settled=24))
    assert (rank.backup_named == 0) is freed


def test_a_rank_that_backs_up_named_steps_in_time_is_calm() -> None:
    rank = state(own_step=10, backup_step=5, backup_named=10)
    kept(rank, 10, every=1)
    assert rank.backup_calm == 1
    rank.backup_named, rank.own_step = 20, 21
    kept(rank, 20, every=2)
    assert rank.backup_calm == 2
    rank.backup_named, rank.own_step = 30, 32
    kept(rank, 30, every=2)
    assert rank.backup_calm == 0


@pytest.mark.parametrize("sent", [-1, 10])
def test_a_restarted_agent_restores_its_named_steps_from_the_pins(sent: int) -> None:
    for before in (state(backup_named=20), state(backup_named=20, backup_whole=10)):
        after = state()
        remember(after, dict(pins(before, 20, sent)))
        assert (after.backup_named, after.backup_whole) == (20, before.backup_whole)
        assert after.backup_step == max(sent, before.backup_whole or -1)
    after = state()
    remember(after, dict(pins(state(), 11, sent)))
    assert (after.backup_named, after.backup_whole, after.backup_step) == (0, 0, sent)


def test_a_rank_that_lost_the_named_step_reports_it() -> None:
    rank = state(own_step=21, backup_step=10, backup_named=20)
    lost(rank, 19)
    assert rank.backup_named == 20
    lost(rank, 20)
    assert (rank.backup_named, pending(rank)) == (10, 0)


SLOWNESS = st.lists(st.integers(1, 90), min_size=2, max_size=4)
"""For each machine, roughly how long a backup takes, in units of time."""


@settings(max_examples=40)
@given(
    slow=SLOWNESS,
    pace=st.integers(1, 20),
    watchers=st.integers(1, 2),
    loss=st.sampled_from([0.0, 0.1, 0.4]),
    delay=st.integers(0, 20),
    seed=st.integers(0, 2**32),
)
def test_any_machine_may_be_lost_at_any_time_after_a_step_is_complete(
    slow: list[int], pace: int, watchers: int, loss: float, delay: int, seed: int
) -> None:
    chance = random.Random(seed)
    takes = [partial(chance.randint, 1 + most // 2, 1 + most) for most in slow]
    job = Job(takes, pace=pace, watchers=watchers, seed=seed)
    job.delay, job.loss = delay, loss
    for _ in range(8):
        job.run(chance.randint(1, 200))
        match chance.choice(["agent", "worker", "silence"]):
            case "agent":
                chance.choice(job.machines).restart()
            case "worker":
                job.watchers[0] = job.watcher()
            case "silence":
                job.silent_until = job.now + 200

    job.delay, job.loss, job.silent_until = 5, 0.0, 0
    job.run(60)
    before = job.whole
    job.run(200 + 3 * max(slow))
    assert job.whole == 0 or job.whole > before, "steps become complete as long as the slowest machine makes backups"


@settings(max_examples=40)
@given(
    slow=SLOWNESS,
    pace=st.integers(1, 20),
    watchers=st.integers(1, 2),
    begins=st.integers(0, 250),
    restarted=st.booleans(),
    loss=st.sampled_from([0.0, 0.3]),
    seed=st.integers(0, 2**32),
)
def test_a_job_that_hangs_at_any_step_is_backed_up(
    slow: list[int], pace: int, watchers: int, begins: int, restarted: bool, loss: float, seed: int
) -> None:
    """The job hangs, for example in an evaluation, and then a machine is lost."""
    chance = random.Random(seed)
    takes = [partial(chance.randint, 1 + most // 2, 1 + most) for most in slow]
    job = Job(takes, pace=pace, watchers=watchers, seed=seed)
    job.loss = loss
    job.run(2 * pace + begins)
    while len({machine.state.own_step for machine in job.machines}) > 1:
        job.run(1)
    if restarted:
        chance.choice(job.machines).restart()
    job.run(150 + 4 * max(slow), stands=True)

    assert any(map(job.survives, job.steps())), [(m.own.held, m.backup.held, m.state) for m in job.machines]
    job.run(300 + 4 * max(slow))  # the model checks its law in each unit; the law must also hold after the hang


def test_a_machine_that_lags_aligns_the_others_with_it() -> None:
    """Watchers name the steps. Without them, a lost machine would leave no step that all ranks have."""
    takes = [lambda: 1, lambda: 1, lambda: 40]
    job = Job(takes, pace=2)
    job.run(300)
    assert job.whole > 100

    alone = Job(takes, pace=2, watchers=0)
    alone.run(300)
    assert not any(map(alone.survives, alone.steps()))


def test_machines_that_keep_up_are_not_aligned() -> None:
    job = Job([lambda: 1, lambda: 1, lambda: 2], pace=4)
    job.run(300)
    assert job.whole == 0
    assert all(machine.state.backup_named == 0 for machine in job.machines)
    assert max(filter(job.survives, job.steps())) >= 300 // 4 - 2


@pytest.mark.parametrize("slots", [4, 5])
def test_four_slots_do_not_suffice(slots: int) -> None:
    job = Job([lambda: 1, lambda: 40], pace=2, slots=slots)
    if slots == 5:
        job.run(400)
    else:
        with pytest.raises(AssertionError, match="was whole"):
            job.run(400)


@pytest.mark.parametrize("delay", [10, 15, 30])
def test_named_steps_are_further_ahead_if_messages_take_long(delay: int) -> None:
    """Each message takes ``delay`` units. With a constant lead, each named step would already be over on arrival."""
    job = Job([lambda: 1, lambda: 1, lambda: 40], pace=2)
    job.delay = delay
    with patch.object(job.random, "randint", lambda _, most: most):
        job.run(600)
        first = job.whole
        job.run(600)
    assert first > 100
    assert job.whole > first + 200


@settings(max_examples=30)
@given(
    slow=SLOWNESS,
    slower=st.lists(st.integers(0, 6), min_size=4, max_size=4),
    pace=st.integers(1, 8),
    meets=st.sampled_from([1, 5, 25, 60]),
    watchers=st.integers(1, 2),
    loss=st.sampled_from([0.0, 0.2]),
    seed=st.integers(0, 2**32),
)
def test_the_law_holds_if_ranks_drift_apart(
    slow: list[int], slower: list[int], pace: int, meets: int, watchers: int, loss: float, seed: int
) -> None:
    chance = random.Random(seed)
    takes = [partial(chance.randint, 1 + most // 2, 1 + most) for most in slow]
    job = Job(takes, pace=pace, slower=slower[: len(slow)], meets=meets, watchers=watchers, seed=seed)
    job.loss = loss
    for _ in range(6):
        job.run(chance.randint(1, 300))
        if chance.random() < 0.5:
            chance.choice(job.machines).restart()
        else:
            job.watchers[0] = job.watcher()


def test_ranks_that_drift_apart_keep_a_step_that_all_of_them_have() -> None:
    """All ranks meet every 25 steps, and one rank is twice as fast. Without named steps, no step is common."""
    takes = [lambda: 1, lambda: 1, lambda: 1]
    job = Job(takes, pace=2, slower=[0, 2, 2], meets=25)
    job.run(400)
    first = job.whole
    job.run(600)
    assert 0 < first < job.whole
    assert all(machine.state.apart > 2 for machine in job.machines)

    alone = Job(takes, pace=2, slower=[0, 2, 2], meets=25, watchers=0)
    empty = 0
    for _ in range(400):
        alone.run(1)
        held = [set(machine.own.held) for machine in alone.machines]
        empty += alone.now > 50 and not set.intersection(*held)
    assert empty > 100, "without named steps, the ranks' own memory often has no common step"
