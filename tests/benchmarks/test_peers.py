"""Environments of the peers, and what is reported of a peer that does not run."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from benchmarks import checkpoint_saves
from benchmarks.peers import environments
from benchmarks.peers.torchrun import PeerFailed, last_words


def wheel(folder: Path, version: str) -> str:
    """Make a package of one module."""
    path = folder / f"peer-{version}-py3-none-any.whl"
    info = f"peer-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("peer.py", f"version = {version!r}")
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: peer\nVersion: {version}\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")
    return str(path)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty cache, and no index."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")


def version_of(python: Path) -> str:
    command = [str(python), "-c", "import peer; print(peer.version)"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_a_peer_is_installed_from_nothing_and_anew_when_its_packages_change(tmp_path: Path) -> None:
    first = environments.python("peer", (wheel(tmp_path, "1.0"),), "peer")
    assert version_of(first) == "1.0"
    assert environments.python("peer", (wheel(tmp_path, "1.0"),), "peer") == first
    second = environments.python("peer", (wheel(tmp_path, "2.0"),), "peer")
    assert second == first and version_of(second) == "2.0"


@pytest.mark.wide
def test_a_peer_that_cannot_be_installed_is_told_with_the_command(tmp_path: Path) -> None:
    with pytest.raises(PeerFailed, match=r"pip install.*no-such-peer==1"):
        environments.python("none", ("no-such-peer==1",), "none")


def test_the_checkpoint_benchmark_names_dlrover_when_it_cannot_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_saves, "calibrate", lambda: 1)
    found = checkpoint_saves.measure([(1, 8)], rounds=0, steps=1, sides=["none", checkpoint_saves.DLROVER])
    assert len(found[0].failures) == 1
    assert re.match(r"DLRover memory: .* pip install .*dlrover==0\.6\.1", found[0].failures[0])


def test_why_a_process_ended_is_not_what_its_destructors_say(tmp_path: Path) -> None:
    code = (
        "class Half:\n"
        "    def __init__(self): raise ValueError('the reason')\n"
        "    def __del__(self): self.missing\n"
        "Half()"
    )
    with (tmp_path / "output").open("wb") as output:
        subprocess.run([sys.executable, "-c", code], stderr=output, check=False)
    assert last_words(tmp_path / "output") == "ValueError: the reason"
    (tmp_path / "silent").touch()
    assert last_words(tmp_path / "silent") == "nothing"
