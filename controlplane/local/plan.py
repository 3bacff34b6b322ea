"""The files by which ``everstep up`` and the supervisor communicate.

``up`` writes ``plan.json``, which lists the processes to run. The supervisor writes ``state.json``, which lists the
processes that run, at every change; after its own restart it reads the file to adopt these processes. A file
``held/<name>`` keeps the process with this name down as long as the process that wrote the file lives.
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
"""Workers stop first, so that they do not react to the end of agents."""


@dataclass(frozen=True)
class ProcessPlan:
    """The plan of one process."""

    name: str
    kind: Kind
    argv: list[str]
    env: dict[str, str] = field(default_factory=dict)
    """Variables in addition to the supervisor's environment."""


@dataclass(frozen=True)
class ClusterPlan:
    """All processes of a cluster, in the order in which they are started."""

    cluster_id: str
    shm: str
    processes: list[ProcessPlan]
    addresses: list[str] = field(default_factory=list)
    """The addresses of the processes, ``host:port``; no other cluster may choose them while this cluster is up."""

    def save(self, home: Path) -> None:
        """Write ``plan.json`` atomically."""
        private.replace(home / "plan.json", json.dumps(asdict(self), indent=1))

    @classmethod
    def load(cls, home: Path) -> ClusterPlan:
        """Read ``plan.json``.

        Raises:
            OSError: there is no such file.
            ValueError: the file is damaged.
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
    """Number of restarts since the cluster came up."""

    @property
    def process(self) -> Process:
        """The identity of the process."""
        return Process(self.pid, self.start)


@dataclass
class State:
    """The state of all processes at the last change."""

    supervisor_pid: int = 0
    supervisor_start: int = 0
    phase: str = "running"
    """``"running"``, or the part that is being stopped."""
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
        """Read ``state.json``; an empty state if it is missing or damaged, or if the computer has rebooted since."""
        try:
            data = json.loads((home / "state.json").read_text())
            if data.pop("boot", "") not in {"", boot_id()}:
                return cls()
            data["processes"] = {name: Running(**entry) for name, entry in data["processes"].items()}
            return cls(**data)
        except (OSError, ValueError, TypeError, KeyError):
            return cls()


def hold(home: Path, name: str) -> None:
    """Keep a process of the plan down after its death, until :func:`let_go` or the death of the caller."""
    holder = cluster_processes.identify(os.getpid())
    assert holder is not None
    private.replace(private.make_folder(home / "held") / name, f"{holder.pid} {holder.start}")


def let_go(home: Path, name: str) -> None:
    """Let the supervisor start a held process again."""
    (home / "held" / name).unlink(missing_ok=True)


def is_held(home: Path, name: str) -> bool:
    """Whether a live process keeps this process down."""
    try:
        pid, start = (home / "held" / name).read_text().split()
        return cluster_processes.alive(Process(int(pid), int(start)))
    except (OSError, ValueError):
        return False
