"""A control group (cgroup) for a drill, with limits."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from everstep.errors import CannotInject


def name(kind: str = "") -> str:
    """The name of this process's group, with the kind of its limits."""
    return f"everstep-drill-{kind}{os.getpid()}"


@contextlib.contextmanager
def made(root: Path, limits: Mapping[str, str], what: str, kind: str = "") -> Iterator[Path]:
    """Make a control group while the block runs; yields its folder.

    Args:
        root: Folder in which groups are made.
        limits: File of the group → text to write to it, in order.
        what: Description of the group in errors.
        kind: Part of the group's name.

    Raises:
        CannotInject: it cannot be made.
    """
    folder = root / name(kind)
    try:
        try:
            folder.mkdir()
            for file, value in limits.items():
                (folder / file).write_text(value)
        except OSError as error:
            raise CannotInject(f"{folder}: no group of processes {what} can be made ({error})") from error
        yield folder
    finally:
        _remove(folder)


def _remove(folder: Path) -> None:
    """Move its remaining processes to the parent group, and remove it."""
    with contextlib.suppress(OSError):
        for pid in (folder / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):
                (folder.parent / "cgroup.procs").write_text(pid)
        folder.rmdir()
