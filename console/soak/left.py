"""The cluster of a soak that was killed: a soak that goes on ends it first."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from pathlib import Path

from console.drill.cluster import HOME, DrillCluster, Say
from console.local import mounts
from everstep import private
from everstep.errors import ClusterError


class LeftCluster:
    """Which cluster is up, in a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def note(self, cluster: DrillCluster) -> None:
        """It is up."""
        told = {"folder": str(cluster.folder), "name": cluster.name, "shm": str(cluster.file.shm)}
        private.replace(self.path, json.dumps(told))

    def forget(self) -> None:
        """It is down, or left up on purpose."""
        self.path.unlink(missing_ok=True)

    async def end(self, say: Say) -> None:
        """Take down what was left, by a command: this process may be about to enter another network.

        Raises:
            ClusterError: it cannot be taken down.
        """
        if not self.path.exists():
            return
        left = json.loads(self.path.read_text())
        folder = Path(left["folder"])
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
        for path in mounts.below(Path(left["shm"])) + mounts.below(folder):
            mounts.unmount(path)
        shutil.rmtree(folder, ignore_errors=True)
        self.forget()
