"""The folders of a job's checkpoints are kept, deleted or set aside."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.errors import CheckpointError
from everstep.shards import folders
from everstep.shards.folders import complete_steps, held_on_disk, prune, set_aside, step_folder, step_folders
from tests.everstep.shards.states import STATE, Slot


@pytest.fixture(scope="module")
def slots(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Slot]:
    folder = tmp_path_factory.mktemp("slots")
    return {step: Slot(folder / f"checkpoint-{step}", STATE[1:], step=step) for step in range(10, 80, 10)}


def here(root: Path) -> list[str]:
    return sorted(path.name for path in (root / "job").iterdir())


@settings(max_examples=30)
@given(
    written=st.lists(st.sets(st.sampled_from(range(10, 80, 10))), min_size=1, max_size=3),
    going=st.sets(st.sampled_from(range(10, 80, 10))),
    others=st.integers(0, 2),
)
def test_complete_steps_are_found_and_given_steps_are_deleted(
    tmp_path_factory: pytest.TempPathFactory,
    slots: dict[int, Slot],
    written: list[set[int]],
    going: set[int],
    others: int,
) -> None:
    """The last ``others`` ranks are on other machines, which share the disk."""
    root = tmp_path_factory.mktemp("root")
    for rank, steps in enumerate(written):
        for step in steps:
            slots[step].write(root, rank)
    ranks = range(max(1, len(written) - others))
    assert complete_steps(root, "job", ranks) == sorted(set.intersection(*(written[rank] for rank in ranks)))
    before = set(step_folders(root, "job"))
    deleted = prune(root, "job", going)
    assert deleted == sorted(before & going)
    after = {(one.completed_steps, one.rank) for one in held_on_disk(root, "job") if one.valid}
    assert after == {(s, rank) for rank, steps in enumerate(written) for s in steps if s not in deleted}


def test_damaged_steps_are_not_complete(slots: dict[int, Slot], tmp_path: Path) -> None:
    for step in (10, 20, 30):
        slots[step].write(tmp_path)
    os.truncate(step_folder(tmp_path, "job", 30) / "rank-0.safetensors", 10)
    assert complete_steps(tmp_path, "job", [0]) == [10, 20]
    assert complete_steps(tmp_path, "job", []) == []


def test_surviving_ranks_of_an_older_run_delete_no_step_of_a_newer_run(slots: dict[int, Slot], tmp_path: Path) -> None:
    older, newer = "20261121-1", "20261121-2"
    for step in (10, 20):
        slots[step].write(tmp_path, run=newer)
    for step in (30, 40):
        slots[step].write(tmp_path, run=older)
    assert complete_steps(tmp_path, "job", [0], run=older) == [30, 40]
    assert complete_steps(tmp_path, "job", [0], run=newer) == [10, 20]
    assert prune(tmp_path, "job", [10, 30], run=older) == [30]
    assert prune(tmp_path, "job", [10], run=newer) == [10]
    assert list(step_folders(tmp_path, "job")) == [20, 40]


def test_a_deletion_that_was_cut_short_is_ended_by_the_next(slots: dict[int, Slot], tmp_path: Path) -> None:
    for step in (10, 20):
        slots[step].write(tmp_path)
    step_folder(tmp_path, "job", 10).rename(tmp_path / "job" / "step-000000010.deleted")
    assert [one.completed_steps for one in held_on_disk(tmp_path, "job")] == [20]
    assert prune(tmp_path, "job", []) == []
    assert here(tmp_path) == ["step-000000020"]


def test_missing_folders_are_no_error(tmp_path: Path) -> None:
    assert prune(tmp_path, "job", [10]) == []
    assert complete_steps(tmp_path, "job", [0]) == []
    assert set_aside(tmp_path, "job", 0, 1) == []


def test_abandoned_steps_are_renamed_and_later_deleted(slots: dict[int, Slot], tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        slots[step].write(tmp_path)  # the writer is generation 3
    assert set_aside(tmp_path, "job", 10, 4, keep=2) == [20, 30, 40]
    assert here(tmp_path) == ["abandoned-g4-step-000000030", "abandoned-g4-step-000000040", "step-000000010"]
    slots[20].write(tmp_path)
    assert set_aside(tmp_path, "job", 10, 5, keep=2) == [20]
    assert here(tmp_path) == ["abandoned-g4-step-000000040", "abandoned-g5-step-000000020", "step-000000010"]
    assert [one.completed_steps for one in held_on_disk(tmp_path, "job")] == [10]


def test_steps_that_the_generation_itself_wrote_stay(slots: dict[int, Slot], tmp_path: Path) -> None:
    """A restarted agent, or a late agent on the same disk, sets the steps aside again."""
    for step in (10, 20):
        slots[step].write(tmp_path)  # the writer is generation 3
    assert set_aside(tmp_path, "job", 10, 3) == []
    assert set_aside(tmp_path, "job", 10, 3, abandoned=lambda manifest: manifest.generation >= 3) == [20]


def test_setting_the_same_step_aside_again_replaces_it(slots: dict[int, Slot], tmp_path: Path) -> None:
    for _ in range(2):
        slots[20].write(tmp_path)
        assert set_aside(tmp_path, "job", 10, 4) == [20]
    assert here(tmp_path) == ["abandoned-g4-step-000000020"]


def test_a_slower_machine_on_the_same_disk_deletes_nothing(
    slots: dict[int, Slot], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One agent listed the steps before a faster agent set one of the steps aside."""
    slots[20].write(tmp_path)
    listed = step_folders(tmp_path, "job")
    read = folders.manifests(listed[20])
    assert set_aside(tmp_path, "job", 10, 4) == [20]
    with monkeypatch.context() as patch:
        patch.setattr(folders, "step_folders", lambda root, job: listed)
        patch.setattr(folders, "manifests", lambda folder: read)
        assert set_aside(tmp_path, "job", 10, 4) == []
    assert here(tmp_path) == ["abandoned-g4-step-000000020"]
    assert (tmp_path / "job" / "abandoned-g4-step-000000020" / "rank-0.json").exists()


def test_a_step_that_cannot_be_set_aside_is_named(
    slots: dict[int, Slot], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots[20].write(tmp_path)

    def refuse(self: Path, target: Path) -> Path:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(CheckpointError, match="step-000000020 cannot be set aside: Permission denied"):
        set_aside(tmp_path, "job", 10, 4)


def test_other_folders_are_not_changed(slots: dict[int, Slot], tmp_path: Path) -> None:
    for step in (10, 20):
        slots[step].write(tmp_path)
    (tmp_path / "job" / "step-final").mkdir()
    (tmp_path / "job" / "notes").write_text("mine")
    assert prune(tmp_path, "job", [10, 30]) == [10]
    assert set_aside(tmp_path, "job", 0, 9) == [20]
    assert here(tmp_path) == ["abandoned-g9-step-000000020", "notes", "step-final"]
