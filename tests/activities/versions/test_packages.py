"""Which distributions an interpreter has installed."""

from __future__ import annotations

import importlib.metadata
import sys
import time
from pathlib import Path

import pytest

from activities.versions import packages
from activities.versions.packages import packages_of


def test_ours_and_those_of_another_interpreter(tmp_path: Path) -> None:
    torch = importlib.metadata.version("torch")
    assert packages_of("")["torch"] == torch
    assert packages_of(sys.executable)["torch"] == torch
    assert packages_of("") == packages_of(sys.executable)


def test_what_is_installed_meanwhile_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "fresh" not in packages_of("")
    (tmp_path / "fresh-1.5.dist-info").mkdir()
    (tmp_path / "fresh-1.5.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: fresh\nVersion: 1.5\n")
    assert packages_of("")["fresh"] == "1.5"


@pytest.mark.parametrize("program", ["echo nonsense", "exit 3", "sleep 60", "echo '[1]'"])
def test_an_interpreter_that_cannot_say_keeps_nobody_waiting(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packages, "LIMIT_S", 0.3)
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nexec {program}\n" if program.startswith("sleep") else f"#!/bin/sh\n{program}\n")
    python.chmod(0o755)
    began = time.monotonic()
    assert packages_of(str(python)) == {}
    assert packages_of("no-such-python") == {}
    assert time.monotonic() - began < 30
