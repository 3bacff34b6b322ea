"""A local cluster for drills, in a temporary folder; its workers can be killed on purpose."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from controlplane.client import Control
from controlplane.local import cluster as local
from controlplane.local import cluster_processes, mounts
from controlplane.local.cluster_file import ClusterFile
from drills.observe.processes import Tree
from everstep.errors import ClusterError, NoCluster, TreeUnknown
from everstep.model.machine import Machine
from everstep.rank import environment

Say = Callable[[str], None]
"""A function that shows a line of progress."""


def silent(_: str) -> None:
    """Ignore a line of progress."""


class DrillCluster:
    """A cluster for one drill or several; an async context manager.

    While it is open, the variable ``EVERSTEP_HOME`` of this process names its folder, so that every part of everstep
    uses this cluster.

    Args:
        machines: Number of machines for jobs.
        standbys: Number of machines that are kept for replacement.
        workers: Number of worker processes.
        keep: Whether the cluster stays up at the end.
        say: Shows lines of progress.

    Raises:
        NoCluster: on entry, if the cluster does not come up.
    """

    prefix = ""
    """Text that a user has to put before a command so that it reaches the cluster."""

    def __init__(
        self, *, machines: int = 4, standbys: int = 1, workers: int = 2, keep: bool = False, say: Say = silent
    ) -> None:
        self.say = say
        self.keep = keep
        self.leaked: list[str] = []
        """Processes, mounts and files that are left after the cluster was taken down."""
        self.before_start: Callable[[DrillCluster], None] = lambda _: None
        """Called when the cluster has its folder and name, before any process is started."""
        self._machines, self._standbys, self._workers = machines, standbys, workers
        self._before: dict[str, str | None] = {}
        self._named: Counter[str] = Counter()

    async def __aenter__(self) -> Self:
        self.folder, self.name = await asyncio.to_thread(self.choose_home)
        self.before_start(self)
        self._set(environment.HOME, str(self.folder))
        self._set(environment.FAULTS, str(self.worker_plan))
        starting = asyncio.create_task(asyncio.to_thread(self.bring_up))
        try:
            self.file = await asyncio.shield(starting)
            self.control = await Control.connect(self.name, local=True)
        except BaseException as error:
            # A thread cannot be cancelled. Wait for it, so that everything that it started can be taken down.
            await asyncio.gather(starting, return_exceptions=True)
            await self._down()
            if isinstance(error, ClusterError):
                raise NoCluster(f"there is no cluster to drill on: {error}") from error
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.control.__aexit__(kind, error, trace)
        if self.keep:
            everstep = f"{self.prefix}EVERSTEP_HOME={self.folder} everstep"
            self.say(f"the cluster stays up: {everstep} down --cluster {self.name} ends it")
            self._restore()
        else:
            await self._down()

    def choose_home(self) -> tuple[Path, str]:
        """Make the folder for ``EVERSTEP_HOME``; return the folder and the name of the cluster."""
        return Path(tempfile.mkdtemp(prefix="everstep-drill-")), f"drill-{secrets.token_hex(3)}"

    def bring_up(self) -> ClusterFile:
        """Start the cluster, and wait until all processes answer."""
        return self.up()

    def up(self, **more: Any) -> ClusterFile:
        """Start the cluster, with further arguments of ``local.up``."""
        sizes: dict[str, Any] = {"machines": self._machines, "standbys": self._standbys, "workers": self._workers}
        return local.up(self.name, **sizes, progress=self.say, **more)

    def clear(self) -> None:
        """Remove the cluster's files."""
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def home(self) -> Path:
        """The folder of the cluster."""
        return self.folder / "clusters" / self.name

    @property
    def worker_plan(self) -> Path:
        """The file with the faults that strike workers; each drill replaces it."""
        return self.home / "drill-workers.json"

    @property
    def machines(self) -> list[Machine]:
        """The machines for jobs."""
        return self.control.machines

    def processes(self) -> dict[str, int]:
        """Return name → pid of the cluster's live processes."""
        return local.processes(self.file)

    def tree(self) -> Tree:
        """Return the tree of the cluster's processes: all below its supervisor."""
        supervisor = local.supervisor_of(self.home)
        return Tree(supervisor.pid if supervisor else 0)

    def next_name(self, what: str) -> str:
        """Return a job name that this cluster has not had yet."""
        self._named[what] += 1
        return f"{what}-{self._named[what]:02d}"

    async def _down(self) -> None:
        seen = set()
        with suppress(TreeUnknown):  # there was no supervisor: the processes are looked up below by the cluster's id
            seen = {process for pid in self.tree().pids() if (process := cluster_processes.identify(pid))}
        try:
            await asyncio.to_thread(local.down, self.name, progress=self.say)
        finally:
            self._restore()
        self.leaked = [
            f"process {process.pid} after the cluster was down" for process in seen if cluster_processes.alive(process)
        ]
        if hasattr(self, "file"):
            left = cluster_processes.of_cluster(self.file.id) - {process.pid for process in seen}
            self.leaked += [f"process {pid} after the cluster was down" for pid in sorted(left)]
            left_mounted = mounts.below(self.folder) + mounts.below(self.file.shm)
            self.leaked += [f"mount {path} after the cluster was down" for path in left_mounted]
            for path in left_mounted:
                mounts.unmount(path)
            if self.file.shm.exists():
                self.leaked += [f"{path} after the cluster was down" for path in self.file.shm.rglob("*")]
        self.clear()

    def _set(self, name: str, value: str) -> None:
        self._before[name] = os.environ.get(name)
        os.environ[name] = value

    def _restore(self) -> None:
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        self._before.clear()
