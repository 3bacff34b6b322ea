"""The command lines of a local cluster's processes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from agent import launcher
from everstep.model.machine import Machine

TEMPLATE_ROOM = 4096
"""Length of the template's last argument, bytes; forked fork servers write their own command lines over it."""


def worker_command() -> list[str]:
    """The command line of a worker; with ``-P``, no file in the current folder hides a module."""
    return [sys.executable, "-P", "-m", "console.main", "worker"]


def agent_command(machine: Machine, state: Path, shm: Path) -> list[str]:
    """The command line of a machine's agent."""
    command = [sys.executable, "-P", "-m", "console.main", "agent", "--machine", machine.name]
    return [*command, "--listen", machine.address, "--state-dir", str(state), "--shm-dir", str(shm), "--prewarm"]


def template_command(socket: Path) -> list[str]:
    """The command line of the template from which the agents' fork servers are forked."""
    program = Path(launcher.__file__).resolve().with_name("template.py")
    command = [sys.executable, "-P", str(program), "--listen", str(socket)]
    return [*command, "--room", " " * TEMPLATE_ROOM]


@dataclass(frozen=True)
class Commands:
    """The programs of a cluster, which tests replace."""

    worker: Callable[[], list[str]] = worker_command
    agent: Callable[[Machine, Path, Path], list[str]] = agent_command
    template: Callable[[Path], list[str]] | None = template_command
    """Makes the command line of the template; None: each agent starts its fork servers itself, as on a real machine."""
    ledger: list[str] | None = None
    """The command line of a server for the ledger; None: the ledger needs no server."""
