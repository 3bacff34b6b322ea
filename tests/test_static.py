"""What needs no run: ruff's rules and format, mypy's types. Beside the other tests, they cost no time of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent


@pytest.mark.timeout(300)
@pytest.mark.parametrize("command", ["ruff check .", "ruff format --check .", "mypy"])
def test_it_has_nothing_to_say(command: str) -> None:
    program, *arguments = command.split()
    done = subprocess.run([BIN / program, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"\n{done.stdout}{done.stderr}"
