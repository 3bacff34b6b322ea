"""Another user of this machine, for tests of what other users may do."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

NOBODY = 65534


def needs_another_user() -> None:
    """Skip the test if it does not run as root, since only root may run code as another user."""
    if os.geteuid():
        pytest.skip("only root may run something as another user")


def as_nobody(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a program of the system as another user."""
    needs_another_user()
    return subprocess.run(  # without its argument ``user``, which forks: gRPC's threads do not allow that
        ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", *command],
        cwd="/",
        env={"PATH": os.defpath},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def python_as_nobody(imports: str, program: str, *arguments: str, given: str = "") -> subprocess.CompletedProcess[str]:
    """Run Python as another user, who may not read our installation. So imports run before the change of user.

    Args:
        imports: Lines that run as our own user.
        program: Lines that run as the other user.
        arguments: ``sys.argv[1:]`` of both.
        given: Standard input.
    """
    needs_another_user()
    become = f"import os; os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY}); os.chdir('/')"
    return subprocess.run(
        [sys.executable, "-P", "-c", f"{imports}\n{become}\n{program}", *arguments],
        input=given,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
