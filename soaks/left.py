"""The cluster that a killed soak left: a soak that is resumed first takes it down."""

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
    """Lock the folder against other soaks while the block runs.

    Raises:
        ConfigError: another soak has the lock.
    """
    with (folder / "lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another soak works in {folder}: name another folder, or wait until it ends") from None
        yield


class LeftCluster:
    """The file that names the cluster of a running soak."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def record(self, cluster: DrillCluster) -> None:
        """Record the cluster before it is started."""
        private.replace(self.path, json.dumps({"folder": str(cluster.folder), "name": cluster.name}))

    def forget(self) -> None:
        """Remove the record, since the cluster is down or stays up on purpose."""
        self.path.unlink(missing_ok=True)

    async def end(self, say: Say) -> None:
        """Take down the recorded cluster, if there is one.

        Another process does that, since this one may be about to enter another network.

        Raises:
            ClusterError: the cluster cannot be taken down.
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
        _, error = await child.communicate()
        if child.returncode:
            raise ClusterError(f"the cluster in {folder} cannot be ended: {error.decode(errors='replace').strip()}")
        for path in [path for root in (*shm, folder) for path in mounts.below(root)]:
            mounts.unmount(path)
        shutil.rmtree(folder, ignore_errors=True)
        self.forget()
