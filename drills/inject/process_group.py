"""Makes a control group (cgroup) with limits for a drill."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from everstep.errors import CannotInject


def name(kind: str = "") -> str:
    """Return the name of the control group of this process for one kind of limits."""
    return f"everstep-drill-{kind}{os.getpid()}"


@contextlib.contextmanager
def made(root: Path, limits: Mapping[str, str], description: str, kind: str = "") -> Iterator[Path]:
    """Make a control group while the block runs; yields its folder.

    Args:
        root: Folder in which groups are made.
        limits: File of the group → text to write to it, in order.
        description: Description of the group for the error.
        kind: Kind of the limits, which is a part of the group's name.

    Raises:
        CannotInject: the group cannot be made.
    """
    folder = root / name(kind)
    try:
        try:
            folder.mkdir()
            for file, value in limits.items():
                (folder / file).write_text(value)
        except OSError as error:
            raise CannotInject(f"{folder}: no control group {description} can be made ({error})") from error
        yield folder
    finally:
        _remove(folder)


def _remove(folder: Path) -> None:
    """Move the processes of a control group to its parent, and remove the group."""
    with contextlib.suppress(OSError):
        for pid in (folder / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):
                (folder.parent / "cgroup.procs").write_text(pid)
        folder.rmdir()
