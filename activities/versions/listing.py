"""Lists the code files of a folder: what git tracks or does not ignore, or else what no ``.gitignore`` excludes."""

from __future__ import annotations

import os
from pathlib import Path

from activities.versions.git import GitFolder, work_tree_of
from activities.versions.ignore import IgnoreFile
from everstep.errors import ConfigError

CACHE = "__pycache__"
"""The name of folders with Python's compiled files, which are never code."""
ENVIRONMENT = "pyvenv.cfg"
"""A folder with this file is a Python environment, with thousands of files that are not the job's."""
MAX_SEEN = 200_000
"""The largest number of files: a folder with more is not the code of a job."""
IGNORE = ".gitignore"


def files_of(folder: Path) -> list[str]:
    """Return the relative paths of the code files in a folder.

    Raises:
        ConfigError: git fails, a folder cannot be read, or there are far too many files.
    """
    names = GitFolder(folder).files() if work_tree_of(folder) else _Walk(folder).files()
    return sorted(name for name in names if CACHE not in name.split("/"))


class _Walk:
    """A walk outside of git: it leaves out files that ``.gitignore`` names, hidden folders, and Python environments."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._found: list[str] = []

    def files(self) -> list[str]:
        self._look("", ())
        return self._found

    def _look(self, prefix: str, rules: tuple[tuple[str, IgnoreFile], ...]) -> None:
        """List one folder; ``rules`` are those of the folders above it, each with its folder, the nearest last."""
        try:
            with os.scandir(self._folder / prefix) as listing:
                entries = list(listing)
            if any(entry.name == IGNORE and entry.is_file() for entry in entries):
                rules = (*rules, (prefix, IgnoreFile((self._folder / prefix / IGNORE).read_bytes())))
        except OSError as error:
            raise ConfigError(
                f"{error.filename} cannot be looked into: {error.strerror}. Have it ignored in a .gitignore"
            ) from error
        for entry in entries:
            path, is_folder = prefix + entry.name, entry.is_dir(follow_symlinks=False)
            if _ignored(rules, path, is_folder=is_folder):
                continue
            if not is_folder:
                self._found.append(path)
            elif not (entry.name.startswith(".") or entry.name == CACHE or Path(entry.path, ENVIRONMENT).exists()):
                self._look(f"{path}/", rules)
        if len(self._found) > MAX_SEEN:
            raise ConfigError(
                f"{self._folder} has more than {MAX_SEEN} files, and is not the code of a job alone: put the code into "
                "a folder of its own, name it with --code DIR, or run it where it lies with --in-place"
            )


def _ignored(rules: tuple[tuple[str, IgnoreFile], ...], path: str, *, is_folder: bool) -> bool:
    """Return whether a path is ignored: the nearest file with a matching rule decides."""
    for prefix, file in reversed(rules):
        told = file.says(path.removeprefix(prefix), is_folder=is_folder)
        if told is not None:
            return told
    return False
