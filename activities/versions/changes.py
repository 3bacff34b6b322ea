"""What changed from one version to another, for people: files, arguments, variables, script, commits."""

from __future__ import annotations

import asyncio
import contextlib
import difflib
from collections.abc import Sequence
from pathlib import Path

from activities.versions.git import GitFolder
from activities.versions.store import StoredCode, VersionStore
from everstep.code_archive import CodeFile
from everstep.errors import ConfigError, VersionStoreError
from everstep.model.version import CodeVersion
from everstep.redaction import redacted
from everstep.text import listed

NAMED = 8
"""Files that are named (ours)."""
DIFF_BYTES = 200_000
"""Larger files are not compared line by line (ours)."""
PATCH_CHARACTERS = 4000
"""Of the patch that is kept with a version (ours)."""


async def changes(
    store: VersionStore | None, before: CodeVersion, after: CodeVersion, secret: Sequence[str] = ()
) -> str:
    """The first line sums it up; a patch follows, as far as it is short.

    Args:
        store: Has both; None: nothing is said of files.
        before: The version that runs.
        after: Another one.
        secret: Names of variables whose values are not shown, as patterns.
    """
    patch = ""
    parts = []
    if before.code != after.code:
        files, patch = await _files(store, before, after)
        parts.append(files)
    if before.script != after.script and before.code:
        parts.append(f"script {before.script} -> {after.script}")
    if before.args != after.args:
        parts.append(f"arguments {_words(before.args)} -> {_words(after.args)}")
    parts += _variables(redacted(before.env, secret), redacted(after.env, secret), before.env, after.env)
    if commits := await asyncio.to_thread(_commits, before, after):
        parts.append(f"commits: {commits}")
    return "\n".join(filter(None, ["; ".join(filter(None, parts)), patch]))


async def _files(store: VersionStore | None, before: CodeVersion, after: CodeVersion) -> tuple[str, str]:
    if not before.code:
        return "a snapshot, and no longer in place", ""
    if store is None or not after.code:
        return "other files", ""
    try:
        with await store.code(before.code) as old, await store.code(after.code) as new:
            return await asyncio.to_thread(_compared, _contents(old), _contents(new))
    except VersionStoreError:
        return "other files, which cannot be compared: the store does not give them", ""


def _contents(stored: StoredCode) -> dict[str, tuple[str, bytes]]:
    found: dict[str, tuple[str, bytes]] = {}

    def take(file: CodeFile, data: bytes) -> None:
        found[file.path] = file.sha256 + file.kind, data if file.bytes <= DIFF_BYTES else b"\0"

    stored.read(take)
    return found


def _compared(old: dict[str, tuple[str, bytes]], new: dict[str, tuple[str, bytes]]) -> tuple[str, str]:
    names: list[str] = []
    patch: list[str] = []
    for path in sorted(old.keys() | new.keys()):
        was, now = old.get(path), new.get(path)
        if was == now or (was and now and was[0] == now[0]):
            continue
        lines = _patch(path, was[1] if was else b"", now[1] if now else b"")
        patch += lines
        added = sum(line.startswith("+") and not line.startswith("+++") for line in lines)
        removed = sum(line.startswith("-") and not line.startswith("---") for line in lines)
        what = "new" if was is None else "removed" if now is None else f"+{added} -{removed}" if lines else "changed"
        names.append(f"{path} ({what})")
    text = "\n".join(patch)
    cut = text if len(text) <= PATCH_CHARACTERS else text[: text.rfind("\n", 0, PATCH_CHARACTERS)] + "\n…"
    return listed(names, NAMED, noun="files"), cut


def _patch(path: str, before: bytes, after: bytes) -> list[str]:
    """A unified diff; none where one is no text."""
    with contextlib.suppress(UnicodeDecodeError):
        old, new = before.decode(), after.decode()
        if "\0" not in old + new:
            return list(difflib.unified_diff(old.splitlines(), new.splitlines(), path, path, lineterm="", n=1))
    return []


def _variables(before: dict[str, str], after: dict[str, str], old: dict[str, str], new: dict[str, str]) -> list[str]:
    changed = [name for name in sorted(old.keys() | new.keys()) if old.get(name) != new.get(name)]
    return [f"{name}={before.get(name, '(none)')} -> {after.get(name, '(none)')}" for name in changed]


def _words(args: Sequence[str]) -> str:
    return " ".join(args) or "(none)"


def _commits(before: CodeVersion, after: CodeVersion) -> str:
    """Those that lead from one to the other, where this machine has the repository."""
    old, new, folder = before.origin.commit, after.origin.commit, Path(after.origin.folder or "/nowhere")
    if not old or not new or old == new or not folder.is_dir():
        return ""
    with contextlib.suppress(ConfigError, OSError):
        return GitFolder(folder).between(old, new)
    return ""
