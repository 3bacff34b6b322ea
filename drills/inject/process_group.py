"""A group of processes (a cgroup) of the drill's own, with limits."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from everstep.errors import CannotInject


def name(kind: str = "") -> str:
    """Name of the group of this process, by kind of its limits."""
    return f"everstep-drill-{kind}{os.getpid()}"


@contextlib.contextmanager
def made(root: Path, limits: Mapping[str, str], what: str, kind: str = "") -> Iterator[Path]:
    """The group's folder, as long as the block lasts.

    Args:
        root: Where groups are made.
        limits: File of the group → what is written to it, in order.
        what: What the group has, for the error.
        kind: Part of its name.

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
    """Move what is left in it to the group above, and remove it."""
    with contextlib.suppress(OSError):
        for pid in (folder / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):
                (folder.parent / "cgroup.procs").write_text(pid)
        folder.rmdir()
