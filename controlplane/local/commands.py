"""The command lines of a local cluster's processes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from agent import launcher
from everstep.model.machine import Machine

TEMPLATE_ROOM = 4096
"""Bytes for the command lines of the fork servers that are forked from the template."""


def worker_command() -> list[str]:
    """How a worker is started. ``-P``: no file of the user's hides a module."""
    return [sys.executable, "-P", "-m", "console.main", "worker"]


def agent_command(machine: Machine, state: Path, shm: Path) -> list[str]:
    """How the agent of a machine is started."""
    command = [sys.executable, "-P", "-m", "console.main", "agent", "--machine", machine.name]
    return [*command, "--listen", machine.address, "--state-dir", str(state), "--shm-dir", str(shm), "--prewarm"]


def template_command(socket: Path) -> list[str]:
    """How the template is started from which the agents' fork servers are forked."""
    program = Path(launcher.__file__).resolve().with_name("template.py")
    command = [sys.executable, "-P", str(program), "--listen", str(socket)]
    return [*command, "--room", " " * TEMPLATE_ROOM]


@dataclass(frozen=True)
class Commands:
    """The programs that a cluster runs; tests put others in their place."""

    worker: Callable[[], list[str]] = worker_command
    agent: Callable[[Machine, Path, Path], list[str]] = agent_command
    template: Callable[[Path], list[str]] | None = template_command
    """None: each agent starts its fork servers itself, as it does alone on a machine."""
    ledger: list[str] | None = None
    """A server for the ledger; None: none is needed."""
