"""There is always a step that all disks have, even if their speeds differ."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.model.checkpoint_policy import CheckpointPolicy
from tests.agent.checkpoints.tiers.disk_job import Job

BY_STEPS = CheckpointPolicy(disk_every_steps=10, disk_every_min=1.0)
BY_TIME = CheckpointPolicy(disk_every_steps=0, disk_every_min=0.5)


@contextmanager
def job(takes: list[Any], **options: Any) -> Iterator[Job]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="everstep-disks-") as folder:
        given: dict[str, Any] = {"pace": 2, "policy": BY_STEPS}
        yield Job(takes, folder=Path(folder), **(given | options))


def always(units: int) -> Any:
    return lambda: units


@pytest.mark.parametrize("slow", [11, 22, 38, 70, 150])
def test_machines_with_disks_of_different_speed_keep_a_common_step(slow: int) -> None:
    """While the slow disk writes one file, ``slow`` steps pass."""
    with job([always(2), always(2), always(2 * slow)]) as one:
        one.run(2 * (8 * slow + 100))
        lags = []
        for _ in range(600):
            one.run(2)
            assert one.common > 0
            lags.append(one.step - one.common)
        assert max(lags) <= 6 * slow + 20


def test_equal_disks_need_no_more_copies(tmp_path: Path) -> None:
    with job([always(4)] * 3) as one:
        for _ in range(100):
            one.run(10)
            assert all(len(machine.disk) <= BY_STEPS.disk_keep + 1 for machine in one.machines)
        assert one.step - one.common <= 20
        assert one.asked == [], "steps that are chosen by number need no request"


@settings(max_examples=25)
@given(
    slow=st.lists(st.integers(1, 300), min_size=2, max_size=4),
    pace=st.integers(1, 12),
    watchers=st.integers(1, 2),
    loss=st.sampled_from([0.0, 0.1, 0.4]),
    delay=st.integers(0, 20),
    keep=st.integers(1, 3),
    by_time=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_a_common_step_on_disk_is_deleted_only_after_a_later_one(
    slow: list[int], pace: int, watchers: int, loss: float, delay: int, keep: int, by_time: bool, seed: int
) -> None:
    chance = random.Random(seed)
    takes = [partial(chance.randint, 1 + most // 2, 1 + most) for most in slow]
    policy = (BY_TIME if by_time else BY_STEPS).model_copy(update={"disk_keep": keep})
    with job(takes, pace=pace, policy=policy, watchers=watchers, seed=seed) as one:
        one.delay, one.loss = delay, loss
        for _ in range(8):
            one.run(chance.randint(1, 300))
            machine = chance.choice(one.machines)
            match chance.choice(["agent", "worker", "silence", "partition", "disk", "well"]):
                case "agent":
                    machine.start()
                case "worker":
                    one.watchers[0] = one.watcher()
                case "silence":
                    one.silent_until = one.now + 300
                case "partition":
                    machine.unheard = not machine.unheard
                case "disk":
                    machine.failing = not machine.failing
                case "well":
                    machine.unheard = machine.failing = False

        one.delay, one.loss, one.silent_until = 5, 0.0, 0
        for machine in one.machines:
            machine.unheard = machine.failing = False
        before = one.settled
        bound = round(policy.disk_every_min * 600)
        one.run(2 * bound + 100 + 8 * pace + 4 * max(slow))
        assert one.settled > before, "new steps are settled as long as the slowest disk writes"
        assert one.common > 0


@pytest.mark.parametrize("policy", [BY_STEPS, BY_TIME])
@settings(max_examples=8)
@given(
    offset_s=st.integers(-10 * 86_400, 10 * 86_400),
    which=st.integers(0, 2),
    slow=st.lists(st.integers(1, 100), min_size=3, max_size=3),
)
def test_a_wrong_clock_changes_nothing(policy: CheckpointPolicy, offset_s: int, which: int, slow: list[int]) -> None:
    told = []
    for offset_ns in (0, offset_s * 10**9):
        offsets = [0, 0, 0]
        offsets[which] = offset_ns
        with job([always(units) for units in slow], policy=policy, offsets_ns=offsets) as one:
            one.run(700)
            one.watchers[0] = one.watcher()  # a new watcher, which has seen nothing yet
            one.run(900)
            told.append((one.asked, one.common, [sorted(machine.disk) for machine in one.machines]))
    assert told[0] == told[1]
    assert policy is BY_STEPS or told[0][0]


def test_a_step_is_requested_from_disks_that_never_write_the_same_step() -> None:
    """One disk gets only multiples of 40. The other disk, whose speed changes from step to step, gets none of these."""

    def takes() -> int:
        step = one.machines[1].writing
        return 28 if step % 20 and step > 10 else 18  # units, which are 14 or 9 steps

    with job([always(60), takes]) as one:
        one.run(2 * 260)
        assert one.common == 0
        one.run(2 * 300)
        assert one.asked and one.common >= one.asked[0][1], "a watcher requested a step, and both disks got it"
