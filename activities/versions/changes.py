"""Describes the changes between two versions: files, arguments, variables, packages and commits.

The text is kept in histories. So its size is limited, and it has no values that look like secrets.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from activities.versions.store import StoredCode
from everstep.base.redaction import HIDDEN, is_secret, masked
from everstep.base.text import first_of, listed, printable
from everstep.model.version import NAME_CHARACTERS, CodeVersion
from everstep.system.code_archive import CodeFile

SUMMARY_CHARACTERS = 1500
"""The largest number of characters in the line that sums a change up."""
PATCH_CHARACTERS = 4000
"""The largest number of characters of the patch."""
FILES_NAMED = 8
COMPARED_BYTES, COMPARED_LINES = 200_000, 4000
"""A file with more bytes or lines is not compared line by line."""
COMPARED_FILES = 50
"""The largest number of files that are compared line by line."""
VALUE_CHARACTERS = 60


@dataclass(slots=True)
class FileChanges:
    """The files that differ, and the contents of those that are small enough for a comparison."""

    added: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    before: dict[str, list[str]] = field(default_factory=dict)
    """Path → the file's lines; an added file is missing here."""
    after: dict[str, list[str]] = field(default_factory=dict)

    @classmethod
    def between(cls, before: StoredCode, after: StoredCode) -> FileChanges:
        """Compare two snapshots."""
        old, new = ({file.path: file for file in one.files} for one in (before, after))
        found = cls(
            added=sorted(new.keys() - old.keys()),
            removed=sorted(old.keys() - new.keys()),
            changed=sorted(path for path in old.keys() & new.keys() if _identity(old[path]) != _identity(new[path])),
        )
        compared = {*[*found.changed, *found.added, *found.removed][:COMPARED_FILES]}
        found.before, found.after = _lines(before, compared), _lines(after, compared)
        return found

    def summary(self) -> str:
        """Return e.g. ``2 files changed (+13 -4): lib/model.py +12 -3, train.py +1 -1; 1 added: x.py +40``."""
        parts = []
        for word, paths in (("changed", self.changed), ("added", self.added), ("removed", self.removed)):
            if paths:
                named = first_of(map(self._named, paths[:FILES_NAMED]), len(paths))
                parts.append(f"{len(paths)} {'file' if len(paths) == 1 else 'files'} {word}: {named}")
        return "; ".join(parts)

    def patch(self, most: int) -> str:
        """Return the lines that differ, up to a number of characters."""
        text = ""
        for path in sorted(self.before.keys() | self.after.keys()):
            old, new = self.before.get(path), self.after.get(path)
            if (old is None and path not in self.added) or (new is None and path not in self.removed):
                continue  # the lines of one side are not known
            names = path if old is not None else "/dev/null", path if new is not None else "/dev/null"
            text += "\n".join(difflib.unified_diff(old or [], new or [], *names, lineterm="", n=1)) + "\n"
            if len(text) > most:
                return text[: text.rfind("\n", 0, most) + 1] + "…"
        return text

    def _named(self, path: str) -> str:
        old, new = self.before.get(path, []), self.after.get(path, [])
        if path not in self.before and path not in self.after:
            return path
        plus = minus = 0
        for tag, i1, i2, j1, j2 in difflib.SequenceMatcher(None, old, new, autojunk=True).get_opcodes():
            if tag != "equal":
                minus, plus = minus + i2 - i1, plus + j2 - j1
        counts = " ".join([*([f"+{plus}"] if plus else []), *([f"-{minus}"] if minus else [])])
        return f"{path} {counts}".rstrip()


def describe_changes(
    before: CodeVersion, after: CodeVersion, files: FileChanges | None, commits: str, redact: Sequence[str]
) -> str:
    """Return the changes; the first line sums them up, and a short patch follows.

    Args:
        before: The version that runs.
        after: The next version.
        files: The differences of their files; None: they are not known.
        commits: The commits in between; empty: there are none, or they are not known.
        redact: Patterns of the names of variables whose values are not shown.
    """
    parts = []
    if before.code != after.code:
        if files is not None:
            parts.append(files.summary())
        elif before.code and after.code:
            parts.append("other files, which cannot be compared because the store cannot be read")
        else:
            parts.append(f"it runs {_where(after)} instead of {_where(before)}")
    for name in ("script", "cwd", "python"):
        old, new = getattr(before, name), getattr(after, name)
        if old != new and (name == "python" or bool(before.code) == bool(after.code)):
            parts.append(f"{name} {_cut(old) or 'none'} -> {_cut(new) or 'none'}")
    if before.args != after.args:
        parts.append(f"arguments {_arguments(before.args, after.args)}")
    if variables := _variables(before.env, after.env, redact):
        parts.append(f"variables {listed(variables)}")
    if commits:
        parts.append(f"commits {commits}")
    if packages := packages_changed(before.packages, after.packages):
        parts.append(f"packages {listed(packages)}")
    if after.origin.dirty and before.code != after.code:
        parts.append(f"its files differ from commit {after.origin.commit[:NAME_CHARACTERS]}")
    line = printable(" ".join("; ".join(filter(None, parts)).split()))[:SUMMARY_CHARACTERS] or "nothing"
    patch = masked(printable(files.patch(PATCH_CHARACTERS))) if files is not None else ""
    return f"{line}\n{patch}".rstrip()


def _identity(file: CodeFile) -> tuple[str, str]:
    return file.kind, file.sha256


def _lines(code: StoredCode, paths: set[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}

    def take(file: CodeFile, contents: bytes) -> None:
        if file.path in paths and len(contents) <= COMPARED_BYTES and b"\0" not in contents:
            lines = contents.decode(errors="replace").splitlines()
            if len(lines) <= COMPARED_LINES:
                found[file.path] = lines

    if paths:
        code.read(take)
    return found


def _where(version: CodeVersion) -> str:
    return f"code {version.code[:NAME_CHARACTERS]}" if version.code else f"in place ({version.script})"


def _arguments(before: list[str], after: list[str]) -> str:
    parts = []
    for tag, i1, i2, j1, j2 in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        old, new = _cut(" ".join(before[max(i1 - 1, 0) : i2])), _cut(" ".join(after[max(j1 - 1, 0) : j2]))
        if tag != "equal":  # the word before is included, because it is the name of the option
            parts.append(f"{old or 'none'} -> {new or 'none'}")
    return listed(parts)


def _variables(before: Mapping[str, str], after: Mapping[str, str], redact: Sequence[str]) -> list[str]:
    def shown(env: Mapping[str, str], name: str) -> str:
        if name not in env:
            return "none"
        return HIDDEN if is_secret(name, env[name], redact) else _cut(env[name]) or "''"

    names = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    return [f"{name} {shown(before, name)} -> {shown(after, name)}" for name in names]


def packages_changed(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """Return e.g. ``torch 2.10 -> 2.11`` for each distribution that differs; empty if one side is not known."""
    if not (before and after):
        return []
    names = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    return [f"{name} {before.get(name, 'none')} -> {after.get(name, 'none')}" for name in names]


def _cut(text: str) -> str:
    return text if len(text) <= VALUE_CHARACTERS else text[: VALUE_CHARACTERS - 2] + " …"
