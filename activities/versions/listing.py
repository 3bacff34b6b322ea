"""Lists the code files of a folder. In a git repository, these are the files that git tracks or does not ignore.

Outside of a git repository, these are the files that no ``.gitignore`` excludes. The lines of ``.gitignore`` are
interpreted by git's own rules, byte for byte. A line is matched with the path of a file or folder itself, not with the
folders above it. The walk goes from the top downwards and never enters an ignored folder, so no line can include a file
of an ignored folder again.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from activities.versions.git import GitFolder, work_tree_of
from everstep.errors import ConfigError

CACHE = "__pycache__"
"""The name of folders with Python's compiled files, which are never code."""
ENVIRONMENT = "pyvenv.cfg"
"""A folder with this file is a Python environment, with thousands of files that are not the job's."""
MAX_SEEN = 200_000
"""The largest number of files: a folder with more is not the code of a job."""
IGNORE = ".gitignore"
_CLASSES = {
    "alnum": "0-9A-Za-z",
    "alpha": "A-Za-z",
    "blank": r" \t",
    "cntrl": r"\x00-\x1f\x7f",
    "digit": "0-9",
    "graph": r"\x21-\x7e",
    "lower": "a-z",
    "print": r"\x20-\x7e",
    "punct": r"!-/:-@\[-`{-~",
    "space": r" \t\n\r\f\v",
    "upper": "A-Z",
    "xdigit": "0-9A-Fa-f",
}


def files_of(folder: Path) -> list[str]:
    """Return the relative paths of the code files in a folder.

    Raises:
        ConfigError: git fails, a folder cannot be read, or there are far too many files.
    """
    names = GitFolder(folder).files() if work_tree_of(folder) else _Walk(folder).files()
    return sorted(name for name in names if CACHE not in name.split("/"))


class _Walk:
    """Walks a folder without a git repository; leaves out ignored files, hidden folders, and Python environments."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._found: list[str] = []

    def files(self) -> list[str]:
        self._walk("", ())
        return self._found

    def _walk(self, prefix: str, rules: tuple[tuple[str, IgnoreFile], ...]) -> None:
        """List one folder and the folders in it. ``rules`` are the rules of the folders above, each with its folder;
        the nearest folder is last."""
        try:
            with os.scandir(self._folder / prefix) as listing:
                entries = list(listing)
            if any(entry.name == IGNORE and entry.is_file() for entry in entries):
                rules = (*rules, (prefix, IgnoreFile((self._folder / prefix / IGNORE).read_bytes())))
        except OSError as error:
            raise ConfigError(
                f"{error.filename} cannot be read: {error.strerror}. Have it ignored in a .gitignore"
            ) from error
        for entry in entries:
            path, is_folder = prefix + entry.name, entry.is_dir(follow_symlinks=False)
            if _ignored(rules, path, is_folder=is_folder):
                continue
            if not is_folder:
                self._found.append(path)
            elif not (entry.name.startswith(".") or entry.name == CACHE or Path(entry.path, ENVIRONMENT).exists()):
                self._walk(f"{path}/", rules)
        if len(self._found) > MAX_SEEN:
            raise ConfigError(
                f"{self._folder} has more than {MAX_SEEN} files, too many for the code of a job: put the code into "
                "a separate folder, name it with --code DIR, or run it from its own folder with --in-place"
            )


def _ignored(rules: tuple[tuple[str, IgnoreFile], ...], path: str, *, is_folder: bool) -> bool:
    """Return whether a path is ignored: the nearest ``.gitignore`` with a matching rule decides."""
    for prefix, file in reversed(rules):
        ignored = file.ignores(path.removeprefix(prefix), is_folder=is_folder)
        if ignored is not None:
            return ignored
    return False


@dataclass(frozen=True, slots=True)
class IgnoreRule:
    """The rule in one line of a ``.gitignore``."""

    pattern: re.Pattern[str]
    ignores: bool
    folders_only: bool
    by_name: bool
    """The pattern matches the last part of a path, at any depth."""


class IgnoreFile:
    """The rules of one ``.gitignore``.

    Args:
        contents: The contents of the file.
    """

    def __init__(self, contents: bytes) -> None:
        lines = contents.removeprefix(b"\xef\xbb\xbf").decode("latin-1").split("\n")
        self._rules = [rule for line in lines if (rule := _rule(line.removesuffix("\r"))) is not None]

    def ignores(self, path: str, *, is_folder: bool) -> bool | None:
        """Return whether a path, relative to the file's folder, is ignored; None: no rule matches."""
        text = os.fsencode(path).decode("latin-1")
        name = text.rpartition("/")[2]
        for rule in reversed(self._rules):
            asked = name if rule.by_name else text
            if (is_folder or not rule.folders_only) and rule.pattern.fullmatch(asked):
                return rule.ignores
        return None


def _rule(line: str) -> IgnoreRule | None:
    line = _without_spaces(line)
    if not line or line.startswith("#"):
        return None
    ignores = not line.startswith("!")
    line = line if ignores else line[1:]
    folders_only = line.endswith("/")
    line = line[:-1] if folders_only else line
    by_name = "/" not in line
    expression = _expression(line.removeprefix("/"), crosses=by_name)
    if not line or expression is None:
        return None
    return IgnoreRule(re.compile(expression, re.DOTALL), ignores, folders_only, by_name)


def _without_spaces(line: str) -> str:
    """Return a line without the spaces at its end; a space after a backslash is kept."""
    bare = line.rstrip(" ")
    backslashes = len(bare) - len(bare.rstrip("\\"))
    return bare + " " if backslashes % 2 and bare != line else bare


def _expression(glob: str, *, crosses: bool) -> str | None:
    """Return a regular expression for a pattern; None: the pattern matches nothing.

    Args:
        glob: The pattern.
        crosses: A star matches slashes too.
    """
    any_part, made, at = ("." if crosses else "[^/]"), "", 0
    while at < len(glob):
        character = glob[at]
        at += 1
        if character == "*":
            begin = at - 1
            while at < len(glob) and glob[at] == "*":
                at += 1
            whole = (begin == 0 or glob[begin - 1] == "/") and at - begin >= 2
            if not crosses and whole and glob.startswith("/", at):
                made, at = made + "(?:.*/)?", at + 1
            elif not crosses and whole and at == len(glob):
                made += ".*"
            else:
                made += f"{any_part}*"
        elif character == "?":
            made += any_part
        elif character == "[":
            found = _class(glob, at)
            if found is None:
                return None
            made, at = made + f"(?!/){found[0]}", found[1]
        elif character == "\\":
            if at == len(glob):
                return None
            made, at = made + re.escape(glob[at]), at + 1
        else:
            made += re.escape(character)
    return made


def _class(glob: str, at: int) -> tuple[str, int] | None:
    """Return the regular expression for a set of characters, and the position after the set; None: the set has no end,
    or names an unknown class."""
    negated = glob[at : at + 1] in {"!", "^"}
    at += negated
    inner, first, before = "", True, ""
    while at < len(glob):
        character = glob[at]
        at += 1
        if character == "]" and not first:
            return (f"[^{inner}]" if negated else f"[{inner}]" if inner else "(?!)"), at
        first = False
        if character == "[" and glob.startswith(":", at) and (end := glob.find(":]", at)) > 0:
            if (name := glob[at + 1 : end]) not in _CLASSES:
                return None
            inner, at, before = inner + _CLASSES[name], end + 2, ""
            continue
        if character == "-" and before and at < len(glob) and glob[at] != "]":
            last = glob[at]
            at += 1
            if last == "\\":
                if at == len(glob):
                    return None
                last = glob[at]
                at += 1
            if before <= last:
                inner += f"{re.escape(before)}-{re.escape(last)}"
            before = ""
            continue
        if character == "\\":
            if at == len(glob):
                return None
            character = glob[at]
            at += 1
        inner, before = inner + re.escape(character), character
    return None
