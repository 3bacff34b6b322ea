"""Which tests belong to a changed file."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import changed


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("agent/jobs/job_ranks.py", ["tests/agent/jobs/test_ranks.py"]),
        ("agent/jobs/new/deep.py", ["tests/agent/jobs/test_ranks.py"]),
        ("agent/main.py", ["tests/agent/test_survival.py"]),
        ("tests/agent/jobs/conftest.py", ["tests/agent/jobs/test_ranks.py"]),
        ("README.md", []),
    ],
)
def test_the_tests_of_a_folder_are_in_the_mirrored_folder(tmp_path: Path, name: str, files: list[str]) -> None:
    for file in ("tests/agent/jobs/test_ranks.py", "tests/agent/test_survival.py", "tests/test_architecture.py"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()

    assert changed.tests_of([name], tmp_path) == files
