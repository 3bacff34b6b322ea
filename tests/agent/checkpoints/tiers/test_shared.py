"""Two machines that write into one folder, as on a shared file system."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agent.checkpoints.tiers.tier_job import JOB, Machine, wait_for


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[list[Machine]]:
    shared = tmp_path / "shared"
    shared.mkdir()
    made = [
        Machine(tmp_path, name=name, ranks=ranks, world=4, disk_path=str(shared))
        for name, ranks in {"m1": (0, 1), "m2": (2, 3)}.items()
    ]
    yield made
    for machine in made:
        machine.close()


def test_each_machine_writes_its_own_ranks_and_lists_all_ranks(machines: list[Machine]) -> None:
    for machine in machines:
        machine.launch()
    for step in (10, 20):
        for machine in machines:
            machine.save(step)
            machine.on_disk(step)
    for machine in machines:
        assert machine.steps(verify=True) == {rank: [10, 20] for rank in range(4)}
    machines[0].restore(3, 20)  # as if rank 3 had moved to this machine
    assert machines[0].holds(3, 20)


def test_a_step_is_kept_until_the_other_machine_has_a_newer_one(machines: list[Machine]) -> None:
    ahead, behind = machines
    for machine in machines:
        machine.launch()
        machine.save(10)
        machine.on_disk(10)
    for step in (20, 30, 40, 50):
        ahead.save(step)
        ahead.on_disk(step)
    left = [10, 20, 40, 50]  # 10 is complete, 40 and 50 are the newest, and the other machine may write 20
    wait_for(lambda: ahead.steps() == {0: left, 1: left, 2: [10], 3: [10]}, "all other steps are deleted")
    for step in (40, 50):
        behind.save(step)
        behind.on_disk(step)
    ahead.save(60)
    ahead.on_disk(60)
    wait_for(
        lambda: behind.steps() == {0: [40, 50, 60], 1: [40, 50, 60], 2: [40, 50], 3: [40, 50]}, "old steps are deleted"
    )


def test_a_renamed_machine_does_not_wait_for_its_old_name(tmp_path: Path) -> None:
    with contextlib.closing(Machine(tmp_path)) as machine:
        machine.launch()
        machine.save(10)
        machine.on_disk(10)
        names = machine.place.state_dir / "checkpoints" / JOB / "machines"
        (names / "m1").rename(names / "m0")
        machine.tiers.shut()
        machine.launch(generation=2, resume_step=10)
        for step in (20, 30, 40):
            machine.save(step)
            machine.on_disk(step)
        wait_for(lambda: machine.steps() == {0: [30, 40], 1: [30, 40]}, "old steps are deleted")


def test_only_the_first_machine_of_a_launch_renames_later_steps(machines: list[Machine]) -> None:
    for machine in machines:
        machine.launch()
    for step in (10, 20):
        for machine in machines:
            machine.save(step)
            machine.on_disk(step)
    for machine in machines:
        machine.tiers.shut()
    first, second = machines
    first.launch(generation=2, resume_step=10)
    first.save(20)
    first.on_disk(20)
    second.launch(generation=2, resume_step=10)
    assert first.steps() == {0: [10, 20], 1: [10, 20], 2: [10], 3: [10]}
    second.save(20)
    second.on_disk(20)
    assert first.steps(verify=True) == {rank: [10, 20] for rank in range(4)}
    assert second.steps(verify=True) == {rank: [10, 20] for rank in range(4)}
    names = sorted(path.name for path in (Path(first.options.disk_path) / JOB).iterdir())
    assert names == ["abandoned-g2-step-000000020", "machines", "step-000000010", "step-000000020"]
