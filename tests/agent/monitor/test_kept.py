"""What inspections keep when their agent dies, and what a reboot changes in it."""

from __future__ import annotations

from pathlib import Path

import pytest
import structlog

from agent.monitor.kept import FILE, KeptStates


def test_it_is_kept_and_a_reboot_is_told_from_a_restart(tmp_path: Path) -> None:
    KeptStates(tmp_path, boot="one").keep("gpu", {"seen": 3})

    assert KeptStates(tmp_path, boot="one").of("gpu") == {"seen": 3}
    assert KeptStates(tmp_path, boot="one").same_boot
    assert KeptStates(tmp_path, boot="two").of("gpu") == {"seen": 3}
    assert not KeptStates(tmp_path, boot="two").same_boot


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"boot": "one"}', b'{"boot": "one", "states": {"gpu": 3}}'])
def test_a_damaged_file_is_ignored(tmp_path: Path, text: bytes) -> None:
    (tmp_path / FILE).write_bytes(text)
    kept = KeptStates(tmp_path, boot="one")

    assert kept.of("gpu") == {}
    assert not kept.same_boot


def test_without_room_an_inspection_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "not there"
    KeptStates(folder, boot="one").keep("gpu", {"seen": 3})
    assert not folder.exists()


def test_what_cannot_be_kept_is_logged_once(tmp_path: Path) -> None:
    kept = KeptStates(tmp_path / "not there", boot="one")
    with structlog.testing.capture_logs() as logged:
        for number in range(3):
            kept.keep("odd", {"seen": {number}})
            kept.keep("gpu", {"seen": number})
    assert len(logged) == 2
