"""Runs the tests of the folders that differ from a branch: ``python -m tests.changed [BRANCH]``, by default ``main``.

The tests of a file are in the folder of ``tests/`` that mirrors the file's folder. ``make test`` runs everything else.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ALWAYS = (
    "tests/test_architecture.py",
    "tests/test_mutants.py",
    "tests/docs/test_reference.py",
    "tests/docs/test_links.py",
)
"""These tests look at all files, and take seconds."""


def differing(branch: str) -> list[str]:
    """Return the files that differ from a branch since it was left, including files that are not committed."""
    commands = (["git", "diff", "--name-only", "--merge-base", branch], ["git", "ls-files", "-o", "--exclude-standard"])
    done = [subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True) for command in commands]
    return sorted({name for each in done for name in each.stdout.splitlines()})


def tests_of(names: Iterable[str], root: Path = ROOT) -> list[str]:
    """Return the test files of the mirrored folders. If there is no mirrored folder, its parent folder is used."""
    found = set()
    for path in map(Path, names):
        folder = root / (path.parent if path.parts[0] == "tests" else Path("tests") / path.parent)
        while not folder.is_dir():
            folder = folder.parent
        if folder != root / "tests":
            found |= {str(file.relative_to(root)) for file in folder.glob("test_*.py")}
    return sorted(found)


def main(branch: str = "main") -> int:
    """Run these tests, and return pytest's exit code."""
    files = [*(name for name in ALWAYS), *tests_of(differing(branch))]
    print(f"tests of the folders that differ from {branch}: {len(files)} files", flush=True)
    marks = ["-m", "not wide and not drill"]
    command = [sys.executable, "-P", "-m", "pytest", "-q", "--numprocesses", "4", "--dist", "loadfile", *marks, *files]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
