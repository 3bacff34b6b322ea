"""The files of a job's runs are kept apart, on disk and on remote storage, even if clocks are wrong."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.errors import CorruptCheckpoint
from everstep.slots.file import SlotFile
from tests.agent.checkpoints.tiers.tier_job import DISK, JOB, REMOTE, Machine, wait_for

FIRST, SECOND = "20261121-100000.000-aaaaaaaa", "20261121-110000.000-bbbbbbbb"


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/remote"


@pytest.fixture
def machine(tmp_path: Path, url: str) -> Iterator[Machine]:
    """A machine on which the earlier run left step 10 on disk and on remote storage."""
    made = Machine(tmp_path, run=FIRST, remote_url=url)
    made.launch()
    made.save(10)
    made.on_disk(10)
    made.on_remote(10)
    yield made
    made.close()


def turn_to(machine: Machine, run: str) -> None:
    """Change a machine to another run, as the agent does."""
    machine.tiers.close()
    jobs = machine.place.state_dir / "jobs" / JOB
    if jobs.exists():
        shutil.rmtree(jobs)
    machine.lose_memory()
    machine.ranks = {}
    machine.turn_to(run)


def aside(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*abandoned*"))


def test_each_file_has_the_run_and_the_sizes_of_its_job(machine: Machine, url: str) -> None:
    found = machine.held(remote_url=url)
    assert {(one.tier, one.run, one.topology) for one in found} == {
        (tier, FIRST, "1,2,1,1,pp-dp-tp") for tier in (DISK, REMOTE)
    }


def test_files_of_an_earlier_run_are_not_used_after_a_clock_was_set_back(
    machine: Machine, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn_to(machine, SECOND)
    monkeypatch.setattr("agent.checkpoints.tiers.job_tiers.time.time_ns", lambda: 1)
    machine.launch()
    assert machine.held() == []
    assert aside(machine.place.state_dir / "checkpoints") == ["abandoned-g1-step-000000010"]
    wait_for(lambda: len(aside(tmp_path / "remote")) == 2, "the remote manifests are set aside")
    assert machine.held(remote_url=url) == []


def test_a_run_keeps_its_own_files_after_a_clock_was_set_forward(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record of the tiers is lost, and the agent restarts after its clock was set forward."""
    machine.tiers.close()
    shutil.rmtree(machine.place.state_dir / "jobs" / JOB)
    machine.tiers = machine.made()
    monkeypatch.setattr("agent.checkpoints.tiers.job_tiers.time.time_ns", lambda: 1 << 62)
    machine.tiers.open(machine.launch_options())
    assert machine.steps() == {0: [10], 1: [10]}


def test_the_step_from_which_a_run_starts_is_kept(machine: Machine) -> None:
    turn_to(machine, SECOND)
    machine.launch(generation=1, resume_step=10)
    assert machine.steps() == {0: [10], 1: [10]}


def test_an_older_run_neither_lists_nor_renames_files_of_a_newer_run(machine: Machine, url: str) -> None:
    turn_to(machine, "20261121-090000.000-cccccccc")
    machine.launch(generation=7)
    machine.tiers.close()
    assert machine.held(remote_url=url) == []
    assert aside(machine.place.state_dir.parent) == []


def test_the_folder_with_the_chosen_save_is_read(machine: Machine, tmp_path: Path) -> None:
    """The job's ``disk_path`` was changed between two runs. Both runs left a copy of the same step."""
    (chosen,) = (one for one in machine.held() if one.rank == 0)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    machine.options.disk_path = str(elsewhere)
    turn_to(machine, SECOND)
    machine.size += 64
    machine.launch(generation=1, resume_step=10)  # the step and the generation are the same, but the size differs
    machine.save(10)
    machine.on_disk(10)
    wait_for((elsewhere / JOB / "step-000000010" / "rank-0.json").exists, "the other save is written")
    machine.lose_memory()

    machine.restore(0, 10, saved_ns=chosen.saved_ns)
    slot = SlotFile(machine.shm / "checkpoint-0", owner=machine.place.owner(0))
    try:
        assert len(slot.load(10).tensors) == machine.size - 64
    finally:
        slot.close()

    for tier in (DISK, REMOTE):
        with pytest.raises(CorruptCheckpoint, match="holds another save of step 10"):
            machine.restore(1, 10, tier, saved_ns=5)
