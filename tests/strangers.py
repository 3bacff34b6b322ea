"""Another user of this machine, for tests of what such a one may do."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

NOBODY = 65534


def needs_another_user() -> None:
    """Only root may become somebody else."""
    if os.geteuid():
        pytest.skip("only root may run something as another user")


def as_nobody(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a program of the system as another user."""
    needs_another_user()
    return subprocess.run(  # not with its argument ``user``: that forks, and gRPC's threads do not bear it
        ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", *command],
        cwd="/",
        env={"PATH": os.defpath},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def python_as_nobody(imports: str, program: str, *arguments: str, given: str = "") -> subprocess.CompletedProcess[str]:
    """Run Python as another user, who may not read our installation: imports come before.

    Args:
        imports: Lines that run as ourselves.
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
