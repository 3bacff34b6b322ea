"""Kills, full and read-only disks, cut and flipped files. What lists as valid is valid, and training continues."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from controlplane.local import mounts
from everstep.errors import CheckpointError, CorruptCheckpoint
from everstep.shards.file import open_shard, restore
from everstep.shards.manifest import read_manifest
from everstep.slots.file import SlotFile
from tests.agent.checkpoints.tiers.tier_job import JOB, Machine, wait_for

SIZE = 3_000_000


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    made = Machine(tmp_path)
    yield made
    made.close()


WRITER = """
import sys
from pathlib import Path
from tests.agent.checkpoints.tiers.tier_job import Machine
machine = Machine(Path(sys.argv[1]), size=3_000_000, disk_every_steps=1)
print(machine.shm.parent, flush=True)
first = max((step for steps in machine.steps().values() for step in steps), default=0)
machine.launch(resume_step=first)
for step in range(first + 1, first + 100_000):
    machine.save(step)
"""


def manifest_beside(steps: Path, known: set[Path]) -> bool:
    return bool(set(steps.glob("*/*.json")) - known)


def test_a_writer_killed_at_any_moment_leaves_nothing_that_lists_as_valid_and_is_not(tmp_path: Path) -> None:
    seed = random.randrange(10**6)
    moments = random.Random(seed)
    steps = tmp_path / "m1" / "checkpoints" / JOB
    found = 0
    for number in range(6):
        before = set(steps.glob("*/*.json"))
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)],
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[4],
            text=True,
        ) as writer:
            assert writer.stdout
            shm = Path(writer.stdout.readline().strip())
            wait_for(lambda: any(steps.glob("*/*.writing")), "a file is being written", 30)
            if number % 2:  # some are killed in the middle of their first file, others later
                wait_for(partial(manifest_beside, steps, before), "a manifest has been written", 30)
            time.sleep(moments.random() * 0.08)
            writer.send_signal(signal.SIGKILL)
        shutil.rmtree(shm)
        machine = Machine(tmp_path, size=SIZE)
        try:
            quick, whole = machine.held(), machine.held(verify=True)
            assert [one.valid for one in quick] == [one.valid for one in whole], f"seed {seed}: {whole}"
            for one in whole:
                found += one.valid
                assert one.valid or "cannot be read" in one.reason, f"seed {seed}"
                if one.valid:
                    assert machine.restore(one.rank, one.completed_steps) > SIZE
                    assert machine.holds(one.rank, one.completed_steps), f"seed {seed}"
        finally:
            machine.close()
    assert found, "at least one valid copy was written"


class SmallDisk:
    """A small file system. If nothing can be mounted, the calls that would fail on it are made to fail."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder, self._patch = folder, patch
        self.real = not mounts.why_not(folder.parent)

    def fill(self) -> None:
        if self.real:
            with contextlib.suppress(OSError), (self.folder / "ballast").open("wb") as file:
                while True:
                    file.write(bytes(1 << 16))
                    file.flush()
        else:
            self._fail(errno.ENOSPC)

    def read_only(self) -> None:
        if self.real:
            subprocess.run(["mount", "-o", "remount,ro", str(self.folder)], check=True)
        else:
            self._fail(errno.EROFS)

    def mend(self) -> None:
        if self.real:
            subprocess.run(["mount", "-o", "remount,rw", str(self.folder)], check=True)
            (self.folder / "ballast").unlink(missing_ok=True)
        else:
            self._patch.undo()

    def _fail(self, number: int) -> None:
        def failing(*_: object) -> None:
            raise OSError(number, os.strerror(number))

        self._patch.setattr("everstep.shards.atomic_output.os.posix_fallocate", failing)


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SmallDisk]:
    disk = SmallDisk(tmp_path / "small", monkeypatch)
    if disk.real:
        with mounts.small(disk.folder, 1 << 20):
            yield disk
    else:
        disk.folder.mkdir()
        yield disk


def test_a_full_disk_is_said_with_numbers_and_used_again_once_there_is_room(small: SmallDisk, tmp_path: Path) -> None:
    machine = Machine(tmp_path, disk_path=str(small.folder))
    try:
        machine.launch()
        machine.save(10)
        machine.on_disk(10)
        small.fill()
        machine.save(20)
        wait_for(lambda: "no room for rank-0.safetensors of 0.0 MB" in machine.problem(), "the full disk is reported")
        assert "MB is free. Free space, keep fewer checkpoints (disk_keep)" in machine.problem()
        assert machine.problem().startswith("step 20 is not on disk: ")
        assert machine.steps() == {0: [10], 1: [10]}
        machine.save(21, 22, 23)
        small.mend()
        machine.save(30)
        machine.on_disk(30)
        wait_for(lambda: machine.problem() == "", "the problem is over")
        assert machine.steps() == {0: [10, 30], 1: [10, 30]}
    finally:
        machine.close()


def test_a_read_only_disk_is_said_and_what_is_on_it_still_used(small: SmallDisk, tmp_path: Path) -> None:
    machine = Machine(tmp_path, disk_path=str(small.folder))
    try:
        machine.launch()
        machine.save(10)
        machine.on_disk(10)
        small.read_only()
        machine.save(20)
        wait_for(
            lambda: "cannot be written: Read-only file system" in machine.problem(), "the read-only disk is reported"
        )
        machine.tiers.shut()
        machine.launch(generation=2, resume_step=10)
        machine.save(20)
        wait_for(
            lambda: "cannot be written: Read-only file system" in machine.problem(),
            "the read-only disk is reported again",
        )
        assert machine.steps() == {0: [10], 1: [10]}
        machine.lose_memory()
        machine.restore(1, 10)
        assert machine.holds(1, 10)
    finally:
        machine.close()


def test_steps_that_cannot_be_set_aside_are_not_listed_all_the_same(small: SmallDisk, tmp_path: Path) -> None:
    machine = Machine(tmp_path, disk_path=str(small.folder))
    try:
        machine.launch()
        for step in (10, 20):
            machine.save(step)
            machine.on_disk(step)
        machine.tiers.shut()
        small.read_only()
        machine.launch(generation=2, resume_step=10)
        assert machine.steps() == {0: [10], 1: [10]}
        assert machine.saved.of(0).disk_step == 10
        if small.real:
            assert "Read-only file system" in machine.problem()
    finally:
        machine.close()


@pytest.mark.parametrize(
    ("damage", "listed", "said"),
    [
        ("cut", False, r"has \d+ of \d+ bytes"),
        ("flip", True, "contents do not match their checksum"),
        ("manifest", False, "cannot be read"),
        ("manifest flip", False, "does not match its own checksum|is not a manifest"),
        ("gone", False, "cannot be read"),
    ],
)
def test_damage_is_named_and_never_restored(machine: Machine, damage: str, listed: bool, said: str) -> None:
    machine.launch()
    machine.save(10)
    machine.on_disk(10)
    machine.lose_memory()
    folder = machine.place.state_dir / "checkpoints" / JOB / "step-000000010"
    data, manifest = folder / "rank-1.safetensors", folder / "rank-1.json"
    match damage:
        case "cut":
            os.truncate(data, data.stat().st_size - 1000)
        case "flip":
            flip(data, data.stat().st_size // 2)
        case "manifest":
            manifest.unlink()
        case "manifest flip":
            flip(manifest, manifest.stat().st_size // 2)
        case "gone":
            data.unlink()
    quick = {one.rank: one for one in machine.held()}
    assert quick[0].valid
    assert quick[1].valid == listed
    whole = {one.rank: one for one in machine.held(verify=True)}
    assert not whole[1].valid
    with pytest.raises(CorruptCheckpoint):
        machine.restore(1, 10)
    assert not machine.holds(1, 10)
    machine.restore(0, 10)
    assert machine.holds(0, 10)
    assert re.search(said, whole[1].reason)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def test_a_copy_of_another_step_is_refused(machine: Machine) -> None:
    machine.launch()
    machine.save(10)
    machine.on_disk(10)
    folder = machine.place.state_dir / "checkpoints" / JOB / "step-000000010"
    folder.rename(folder.with_name("step-000000011"))
    assert all("holds the state after step 10" in one.reason for one in machine.held())
    with pytest.raises(CorruptCheckpoint, match="holds the state after step 10"):
        machine.restore(0, 11)


def test_full_shared_memory_does_not_cost_the_copy_on_disk(machine: Machine, tmp_path: Path) -> None:
    machine.launch()
    machine.save(10)
    machine.on_disk(10)
    folder = machine.place.state_dir / "checkpoints" / JOB / "step-000000010"
    if mounts.why_not(tmp_path):
        pytest.fail("a small file system cannot be mounted here, and a full /dev/shm cannot be made in another way")
    with mounts.small(tmp_path / "shm", 1 << 16):
        slots = SlotFile(tmp_path / "shm" / "checkpoint-0", slots=3, owner=machine.place.owner(0))
        with pytest.raises(CheckpointError, match="no room for checkpoints"), open_shard(folder, 0) as read:
            restore(read_manifest(folder, 0), read, slots)
        slots.close()
    assert machine.steps(verify=True) == {0: [10], 1: [10]}


def test_an_agent_that_dies_in_the_middle_of_a_write_begins_anew(tmp_path: Path) -> None:
    machine = Machine(tmp_path, size=60_000_000)
    try:
        machine.launch()
        machine.save(10)
        folder = machine.place.state_dir / "checkpoints" / JOB / "step-000000010"
        wait_for(lambda: any(folder.glob("*.writing")), "a file is being written")
        dead = machine.tiers
        machine.tiers = machine.made()  # the next agent finds the pin and the incomplete file of the killed agent
        machine.saved.clear()
        dead.shut()
        (folder / "rank-0.safetensors.0123abcd.writing").write_bytes(b"half")
        machine.tiers.open(machine.launch_options())
        machine.on_disk(10)
        dead.close()
        assert not list(folder.glob("*.writing"))
        assert machine.steps(verify=True) == {0: [10], 1: [10]}
        machine.lose_memory()
        machine.restore(0, 10)
        assert machine.holds(0, 10)
    finally:
        machine.close()
