"""Small file systems that drills mount and fill. At the end, only these are unmounted."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path

import pytest

from controlplane.local import mounts, stopping
from everstep.errors import ClusterError

needs_mounts = pytest.mark.skipif(bool(os.geteuid()), reason="mounting needs root")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    if said := mounts.why_not(tmp_path):
        pytest.skip(said)
    return tmp_path / "a folder\twith odd characters"


@needs_mounts
def test_a_small_file_system_is_full_soon_and_gone_at_the_end(place: Path) -> None:
    with pytest.raises(KeyboardInterrupt), mounts.small(place, 1 << 20):
        assert mounts.below(place.parent) == [place]
        (place / "fits").write_bytes(b"x" * 1000)
        with pytest.raises(OSError) as full:
            (place / "large").write_bytes(b"x" * (2 << 20))
        assert full.value.errno == errno.ENOSPC
        raise KeyboardInterrupt
    assert mounts.below(place.parent) == []
    assert list(place.iterdir()) == []


@needs_mounts
def test_what_is_there_stays_when_room_is_taken_away(place: Path) -> None:
    with mounts.small(place, 64 << 20):
        (place / "kept").write_bytes(b"x" * (1 << 20))
        mounts.shrink(place, 1 << 16)
        (place / "fits").write_bytes(b"x" * 1000)
        with pytest.raises(OSError, match="No space"):
            (place / "large").write_bytes(b"x" * (1 << 17))
        assert (place / "kept").stat().st_size == 1 << 20


@needs_mounts
def test_what_is_in_use_is_unmounted_all_the_same(place: Path) -> None:
    with mounts.small(place, 1 << 20), mounts.small(place / "inner", 1 << 20):
        used = (place / "inner" / "file").open("wb")
    assert mounts.below(place) == []
    used.close()


@needs_mounts
def test_shared_memory_is_removed_with_what_is_mounted_in_it(place: Path) -> None:
    forgotten = mounts.small(place / "m1", 1 << 20)
    forgotten.__enter__()
    stopping.remove_shared_memory(place)
    assert not place.exists()
    assert mounts.below(place.parent) == []


@needs_mounts
def test_what_others_mounted_is_left_alone(place: Path) -> None:
    (place / "theirs").mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "somebody", place / "theirs"], check=True)
    try:
        mounts.unmount(place.parent)
        assert (place / "theirs").is_mount()
    finally:
        subprocess.run(["umount", place / "theirs"], check=True)


def test_who_may_not_mount_is_told_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "needs root" in mounts.why_not(tmp_path)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ClusterError, match="needs root"), mounts.small(tmp_path / "x", 1):
        pass
