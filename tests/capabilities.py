"""Runs programs with chosen capabilities, as containers and systemd do; needs root."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence

import pytest

needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None, reason="only root can give and take capabilities (setpriv)"
)


def in_container(command: Sequence[str], *capabilities: str) -> list[str]:
    """Return the command of a container's root, which has only these capabilities."""
    bounds = ",".join(["-all", *(f"+{name}" for name in capabilities)])
    return ["setpriv", "--bounding-set", bounds, "--inh-caps", "-all", *command]


def in_unit(command: Sequence[str], *capabilities: str) -> list[str]:
    """Return the command of an ordinary user to whom systemd gives these ambient capabilities.

    The user is root without root's privileges, since another user may not be able to read the environment of the tests.
    """
    given = ",".join(f"+{name}" for name in capabilities)
    return ["setpriv", "--securebits", "+noroot", "--inh-caps", f"-all,{given}", "--ambient-caps", given, *command]
