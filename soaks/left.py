"""The cluster of a soak that was killed: a soak that goes on ends it first."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from controlplane.local import mounts
from drills.clusters.local import DrillCluster, Say
from everstep.errors import ClusterError, ConfigError
from everstep.rank.environment import HOME
from everstep.system import private_files as private


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """A lock: while it is held, no other soak works in the folder.

    Raises:
        ConfigError: another soak holds it.
    """
    with (folder / "lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"a soak is at work in {folder}: name another folder, or wait for it") from None
        yield


class LeftCluster:
    """A file that names the cluster that is up."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def note(self, cluster: DrillCluster) -> None:
        """Record that the cluster is about to come up."""
        private.replace(self.path, json.dumps({"folder": str(cluster.folder), "name": cluster.name}))

    def forget(self) -> None:
        """Remove the record: the cluster is down, or left up on purpose."""
        self.path.unlink(missing_ok=True)

    async def end(self, say: Say) -> None:
        """Take down a cluster that was left, by a command: this process may be about to enter another network.

        Raises:
            ClusterError: it cannot be taken down.
        """
        if not self.path.exists():
            return
        left = json.loads(self.path.read_text())
        folder = Path(left["folder"])
        described = folder / "clusters" / left["name"] / "cluster.json"
        shm = [Path(json.loads(described.read_text())["shm"])] if described.exists() else []
        say(f"ending the cluster that was left in {folder}")
        command = [sys.executable, "-P", "-m", "console.main", "down", "--cluster", left["name"], "--purge"]
        child = await asyncio.create_subprocess_exec(
            *command,
            env=os.environ | {HOME: str(folder)},
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        _, said = await child.communicate()
        if child.returncode:
            raise ClusterError(f"the cluster in {folder} cannot be ended: {said.decode(errors='replace').strip()}")
        for path in [path for place in (*shm, folder) for path in mounts.below(place)]:
            mounts.unmount(path)
        shutil.rmtree(folder, ignore_errors=True)
        self.forget()
