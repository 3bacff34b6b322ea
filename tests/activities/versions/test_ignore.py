"""The rules of ``.gitignore`` in everstep give the same files as git itself."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from activities.versions import listing
from activities.versions.listing import IgnoreFile
from tests.activities.versions.repository import Repository

PARTS = ["a", "b", "ab", "a.py", "b.bin", "a b", "-", "]", "\\", "x!"]
PIECES = [
    "a",
    "b",
    "*",
    "**",
    "/",
    "/",
    "?",
    "!",
    "#",
    ".py",
    ".bin",
    " ",
    "\\",
    "[ab]",
    "[!a]",
    "[^a-b]",
    "[a",
    "]",
    "[]a]",
]
PIECES += ["[[:alpha:]]", "[[:odd:]]", "[\\]-]", "[-a]", "[b-a]", "[a-]", "-", "[", "\t", "/**/", "**/", "/**"]
LINE = st.lists(st.sampled_from(PIECES), min_size=1, max_size=5).map("".join)
# Git's manual says that two stars right after other characters count as one. Git itself does not obey this where the
# characters are plain.
LINES = st.lists(LINE.filter(lambda line: not re.search(r"[^/!]\*\*", line)), max_size=4).map("\n".join)
TREE = [f"{one}/{two}" for one in PARTS[:4] for two in PARTS] + [
    f"b/{one}/{two}" for one in PARTS for two in ("a", "b.bin")
]
TREE += [part for part in PARTS if not any(path.startswith(f"{part}/") for path in TREE)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Make the same files in a git repository and in a plain folder."""
    home = tmp_path_factory.mktemp("ignore")
    repository = Repository(home / "git")
    for name in TREE:
        path = repository.folder / name
        if not any(above.is_file() for above in path.parents) and not path.is_dir():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("")
    shutil.copytree(repository.folder, home / "plain", ignore=shutil.ignore_patterns(".git"))
    return repository.folder, home / "plain"


@settings(max_examples=100)
@given(LINES, LINES)
@example("*\n!*/\n!*.py", "")
@example("b/\n!b/a.py", "")
@example("b\n!b/a", "!a")
@example("a/**\n!a/**/a.py", "/a\n\\!\na\\ ")
@example("inner/\n!b", "a \\\n\\#\r\n# a\n!a.py\\ ")
@example("*.py\n!a", "!*\r")
def test_outside_of_git_it_is_what_git_ignores(folders: tuple[Path, Path], top: str, below: str) -> None:
    for folder in folders:
        (folder / ".gitignore").write_text(top, newline="")
        (folder / "b/.gitignore").write_text(below, newline="")
    repository, plain = folders
    assert listing.files_of(plain) == listing.files_of(repository)


def test_a_mark_of_the_encoding_is_no_part_of_the_first_line() -> None:
    assert IgnoreFile(b"\xef\xbb\xbf*.bin\n").ignores("a.bin", is_folder=False) is True
    assert IgnoreFile(b"caf?\n").ignores("caf\udce9", is_folder=False) is True
