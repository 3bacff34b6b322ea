"""The copies that exist, read from the files themselves. Drills compare them with the agents' answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from controlplane.local.cluster_file import ClusterFile
from drills.faults.all import drill_request
from drills.observe.stored_copies import Damaged, StoredCopies
from drills.spec.loss import Loss
from everstep.model.job import JobSpec
from everstep.model.machine import Machine
from everstep.slots.file import SlotFile

RANKS = range(4)


def a_job(shared: Path | None) -> JobSpec:
    request = drill_request(fault="kill-rank", machines=4, ranks_per_machine=1, tp=2, pp=1)
    spec = request.spec("job", {})
    checkpoint = spec.checkpoint.model_copy(update={"disk_path": str(shared) if shared else ""})
    return spec.model_copy(update={"checkpoint": checkpoint})


def a_cluster(folder: Path) -> ClusterFile:
    return ClusterFile(
        name="trial",
        home=folder / "home",
        shm=folder / "shm",
        temporal_address="",
        ui_url="",
        ledger_url="",
        machines=[Machine(name=f"m{index}", address="127.0.0.1:1") for index in range(5)],
        standbys=1,
    )


def save(path: Path, *steps: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    file = SlotFile(path, slots=3)
    for step in steps:
        file.begin(b"structure", 1000)
        file.commit(step)
    file.close()


def write(stored: StoredCopies, rank: int, step: int, *, whole: bool = True) -> None:
    for suffix in ("safetensors", "json")[: 1 + whole]:
        path = stored.on_disk(rank, step, suffix)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"state")


@pytest.mark.parametrize("shared", [True, False])
def test_the_copies_that_are_left_after_a_strike(tmp_path: Path, shared: bool) -> None:
    spec = a_job(tmp_path / "disk" if shared else None)
    stored = StoredCopies(a_cluster(tmp_path), spec)
    for rank in RANKS:
        save(stored.own(rank), 18, 19, 20)
        backup = stored.backup(rank)
        assert backup is not None and backup.parent != stored.own(rank).parent
        save(backup, 19, 20)
        write(stored, rank, 15)
        write(stored, rank, 20, whole=rank != 3)  # the copy of rank 3 is unfinished, so it has no manifest
    assert stored.newest() == 20
    everything = stored.left(Loss())
    assert everything == {rank: {15, 18, 19, 20} for rank in RANKS}

    backup = stored.backup(0)
    assert backup is not None
    home, peer = 0, int(backup.parts[-3].removeprefix("m"))
    assert stored.left(Loss((home,)))[0] == {19, 20} | ({15} if shared else set())
    assert stored.left(Loss((home, peer)))[0] == ({15, 20} if shared else set())
    assert stored.left(Loss((home, peer), disks=False))[0] == {15, 20}
    assert stored.left(Loss((home,)), disks=False)[0] == {19, 20}
    assert stored.left(Loss(ranks=(0,))) == everything

    bad = [Damaged(backup, 0, 20, "flipped"), Damaged(stored.on_disk(0, 20, "safetensors"), 0, 20, "cut")]
    assert stored.left(Loss((home,)), bad)[0] == {19} | ({15} if shared else set())
    bad.append(Damaged(stored.own(0), 0, 20, "flipped"))
    assert stored.left(Loss(), bad)[0] == {15, 18, 19}


def test_a_backup_that_is_being_written_is_seen(tmp_path: Path) -> None:
    stored = StoredCopies(a_cluster(tmp_path), a_job(None))
    path = stored.backup(2)
    assert path is not None
    machine = int(path.parts[-3].removeprefix("m"))
    save(path, 19)
    assert stored.receiving(machine) is None
    file = SlotFile(path)
    file.begin(b"structure", 1000)
    assert stored.receiving(machine) == 2
    file.commit(20)
    assert stored.receiving(machine) is None
