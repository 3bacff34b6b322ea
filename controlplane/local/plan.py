"""The files through which ``everstep up`` and the supervisor talk.

``plan.json`` says which processes shall run; ``up`` writes it. ``state.json``
says which do; the supervisor writes it at every change, and reads it after its
own restart to adopt what runs. ``held/<name>`` says that a process shall stay
down for now, as long as the one who said so lives.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from controlplane.local import cluster_processes
from controlplane.local.cluster_processes import Process
from everstep.system import private_files as private
from everstep.system.procfs import boot_id

Kind = Literal["temporal", "worker", "agent", "template", "ledger"]

STOP_ORDER: tuple[Kind, ...] = ("worker", "agent", "template", "ledger", "temporal")
"""Workers first, so that nothing is decided about the agents that go away."""


@dataclass(frozen=True)
class ProcessPlan:
    """A process that shall run."""

    name: str
    kind: Kind
    argv: list[str]
    env: dict[str, str] = field(default_factory=dict)
    """Beside the supervisor's own environment."""


@dataclass(frozen=True)
class ClusterPlan:
    """All processes of a cluster, in the order in which they are started."""

    cluster_id: str
    shm: str
    processes: list[ProcessPlan]
    addresses: list[str] = field(default_factory=list)
    """Where they listen, ``host:port``: no other cluster may choose these while this one is up."""

    def save(self, home: Path) -> None:
        """Write ``plan.json`` atomically."""
        private.replace(home / "plan.json", json.dumps(asdict(self), indent=1))

    @classmethod
    def load(cls, home: Path) -> ClusterPlan:
        """Read ``plan.json``.

        Raises:
            OSError: there is none.
            ValueError: it is damaged.
        """
        data = json.loads((home / "plan.json").read_text())
        processes = [ProcessPlan(**entry) for entry in data["processes"]]
        return cls(data["cluster_id"], data["shm"], processes, data.get("addresses", []))


@dataclass
class Running:
    """A process that was started."""

    pid: int
    start: int
    kind: Kind
    restarts: int = 0
    """How often it was started again since the cluster came up."""

    @property
    def process(self) -> Process:
        """Its identity."""
        return Process(self.pid, self.start)


@dataclass
class State:
    """What the supervisor last saw."""

    supervisor_pid: int = 0
    supervisor_start: int = 0
    phase: str = "running"
    """``"running"``, or what is being stopped."""
    processes: dict[str, Running] = field(default_factory=dict)

    @property
    def supervisor(self) -> Process:
        """The supervisor's identity."""
        return Process(self.supervisor_pid, self.supervisor_start)

    def save(self, home: Path) -> None:
        """Write ``state.json`` atomically."""
        state = asdict(self) | {"boot": boot_id()}
        private.replace(home / "state.json", json.dumps(state, indent=1))

    @classmethod
    def load(cls, home: Path) -> State:
        """Read ``state.json``; empty when there is none, it is damaged, or the machine was started anew since."""
        try:
            data = json.loads((home / "state.json").read_text())
            if data.pop("boot", "") not in {"", boot_id()}:
                return cls()
            data["processes"] = {name: Running(**entry) for name, entry in data["processes"].items()}
            return cls(**data)
        except (OSError, ValueError, TypeError, KeyError):
            return cls()


def hold(home: Path, name: str) -> None:
    """Keep a process of the plan down once it is dead, until :func:`let_go`, or until the caller dies."""
    holder = cluster_processes.identify(os.getpid())
    assert holder is not None
    private.replace(private.make_folder(home / "held") / name, f"{holder.pid} {holder.start}")


def let_go(home: Path, name: str) -> None:
    """Let the supervisor start a held process again."""
    (home / "held" / name).unlink(missing_ok=True)


def is_held(home: Path, name: str) -> bool:
    """Whether somebody who lives wants a process to stay down."""
    try:
        pid, start = (home / "held" / name).read_text().split()
        return cluster_processes.alive(Process(int(pid), int(start)))
    except (OSError, ValueError):
        return False
