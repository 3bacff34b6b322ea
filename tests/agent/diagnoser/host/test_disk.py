"""The disk test reads what it has written, fills no disk, and leaves no file."""

from __future__ import annotations

import errno
import mmap
from pathlib import Path

import pytest

from agent.diagnoser.diagnostic import Bench
from agent.diagnoser.host import disk
from agent.diagnoser.host.disk import BLOCK, DAMAGED, FAILS, DiskTest, DiskTestLimits
from everstep.errors import CannotInspect
from everstep.model.finding import Health

SMALL = DiskTestLimits(mb=9)


def test_a_disk_that_works_is_measured_and_nothing_is_left(tmp_path: Path) -> None:
    found = DiskTest(Bench("m0", folder=tmp_path), SMALL).run()

    assert found.verdict is Health.HEALTHY
    assert found.measures["verified_bytes"] == 2 * BLOCK
    assert min(found.measures.values()) > 0
    assert list(tmp_path.iterdir()) == []


def test_a_block_that_comes_back_changed_names_the_disk(tmp_path: Path) -> None:
    class BadDisk(DiskTest):
        """A disk on which one bit of the second block is wrong."""

        def read(self, buffer: mmap.mmap, index: int) -> bytes:
            return bytes([buffer[0] ^ index]) + buffer[1:]

    found = BadDisk(Bench("m0", folder=tmp_path), SMALL).run()
    assert [(one.reason, one.evidence) for one in found.findings] == [(DAMAGED.code, ["block 1 of 2, 4194304 bytes"])]


@pytest.mark.parametrize(("number", "faulty"), [(errno.EIO, True), (errno.ENOSPC, False)])
def test_errors_of_the_disk_are_its_fault_and_others_are_not(tmp_path: Path, number: int, faulty: bool) -> None:
    class FailingDisk(DiskTest):
        def read(self, buffer: mmap.mmap, index: int) -> bytes:
            raise OSError(number, "it says no")

    test = FailingDisk(Bench("m0", folder=tmp_path), SMALL)
    if faulty:
        assert [one.reason for one in test.run().findings] == [FAILS.code]
    else:
        with pytest.raises(OSError, match="it says no"):
            test.run()


def test_no_disk_is_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "free", lambda _: BLOCK * 10)
    with pytest.raises(CannotInspect, match="does not fit"):
        DiskTest(Bench("m0", folder=tmp_path), DiskTestLimits(mb=9, share=0.05)).run()
    found = DiskTest(Bench("m0", folder=tmp_path), DiskTestLimits(mb=1e6, share=0.2)).run()
    assert found.measures["verified_bytes"] == 2 * BLOCK
