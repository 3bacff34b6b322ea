"""This module assigns lines of the kernel log to the machines of a local cluster, which all share one kernel.

Each line has a tag with the machine's name and the id of its start. After a simulated loss of power a machine has a new
start id, so that earlier lines no longer concern it.
"""

from __future__ import annotations

import secrets
from contextlib import suppress
from pathlib import Path

from everstep.system import private_files as private

FILE = "boot"
"""File with the start id, in the state folder of a machine; it does not exist before the first loss of power."""


def boot_of(state_dir: Path) -> str:
    """Return the start id of a machine; empty: it never lost its power."""
    with suppress(OSError):
        return (state_dir / FILE).read_text()
    return ""


def begin_anew(state_dir: Path) -> None:
    """Give a machine a new start id, before it is started after a loss of power."""
    private.replace(private.make_folder(state_dir) / FILE, secrets.token_hex(4))


def tag_of(cluster: str, machine: str, state_dir: Path) -> str:
    """Return the beginning of the lines that are for the current start of a machine.

    Args:
        cluster: Id of the cluster.
        machine: Its name.
        state_dir: Its state folder.
    """
    boot = boot_of(state_dir)
    return f"everstep {cluster}/{machine}{f'#{boot}' if boot else ''}:"
