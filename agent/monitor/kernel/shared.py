"""One kernel under all machines of a local cluster: which of its lines are for which machine, and since when it is on.

A machine that lost its power begins anew: what the kernel said before concerns it no more.
"""

from __future__ import annotations

import secrets
from contextlib import suppress
from pathlib import Path

from everstep.system import private_files as private

FILE = "boot"
"""In the state folder of a machine: which start of it this is; it is not there before the first loss of power."""


def boot_of(state_dir: Path) -> str:
    """Which start of a machine this is; empty: the first one."""
    with suppress(OSError):
        return (state_dir / FILE).read_text()
    return ""


def begin_anew(state_dir: Path) -> None:
    """The machine is about to be started after it lost its power."""
    private.replace(private.make_folder(state_dir) / FILE, secrets.token_hex(4))


def tag_of(cluster: str, machine: str, state_dir: Path) -> str:
    """What lines for a machine begin with, as it is on now.

    Args:
        cluster: Id of the cluster.
        machine: Its name.
        state_dir: Its state folder.
    """
    boot = boot_of(state_dir)
    return f"everstep {cluster}/{machine}{f'#{boot}' if boot else ''}:"
