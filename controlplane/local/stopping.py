"""Stops the processes of a cluster in order, and frees its shared memory; no other process is touched."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

from controlplane.local import cluster_processes, mounts
from controlplane.local.plan import STOP_ORDER, Kind, State
from everstep.system import private_files as private

GRACE_S: dict[Kind, float] = {"worker": 3.0, "agent": 3.0, "template": 3.0, "ledger": 5.0, "temporal": 5.0}
"""Kind of process → time from SIGTERM to SIGKILL, seconds."""
NAMES: dict[Kind, str] = {
    "worker": "stopping workers",
    "agent": "stopping agents",
    "template": "stopping the template of fork servers",
    "ledger": "stopping the ledger's server",
    "temporal": "stopping Temporal",
}
ROUNDS = 20
"""Limit of rounds of kills; a process that is forked during one round is killed in the next round."""


def stop_all(state: State, cluster_id: str, say: Callable[[str], None]) -> None:
    """Stop every process of a cluster, in order.

    Args:
        state: The processes that were started.
        cluster_id: Id of the cluster, which all its other processes have in their environment.
        say: Is called with the name of the part that is stopped now.
    """
    for kind in STOP_ORDER:
        if kind == "temporal":  # fork servers and ranks end before the Temporal server
            say("stopping fork servers and ranks")
            spared = {entry.pid for entry in state.processes.values() if entry.kind == "temporal"}
            spared.add(state.supervisor_pid)
            kill_all(cluster_id, spared)
        processes = [entry.process for entry in state.processes.values() if entry.kind == kind]
        if any(map(cluster_processes.alive, processes)):
            say(NAMES[kind])
        for process in processes:
            cluster_processes.send(process, signal.SIGTERM)
        for process in cluster_processes.wait_gone(processes, GRACE_S[kind]):
            cluster_processes.send(process, signal.SIGKILL)
        cluster_processes.wait_gone(processes, 5.0)
    kill_all(cluster_id, {state.supervisor_pid})


def kill_all(cluster_id: str, spared: set[int]) -> None:
    """SIGKILL every process of a cluster, except the spared pids, the caller and its ancestors."""
    for _ in range(ROUNDS):
        found = {
            process
            for pid in cluster_processes.of_cluster(cluster_id) - spared
            if (process := cluster_processes.identify(pid))
        }
        if not found:
            return
        for process in found:
            cluster_processes.send(process, signal.SIGKILL)
        cluster_processes.wait_gone(found, 1.0)


HOME_FILE = ".home"
"""Name of the file in a cluster's shared memory that has the path of the cluster's folder."""


def make_shared_memory(shm: Path, home: Path) -> None:
    """Make the folder for the shared memory of a cluster, which only its user can enter.

    Raises:
        ConfigError: it exists, and other users can enter it.
    """
    private.replace(private.make_folder(shm) / HOME_FILE, str(home))


def remove_shared_memory(shm: Path) -> None:
    """Free the shared memory of a cluster, and unmount the file systems that a drill mounted there."""
    mounts.unmount(shm)
    shutil.rmtree(shm, ignore_errors=True)


def remove_stale(root: Path) -> list[Path]:
    """Remove shared memory of clusters that have neither a live process nor a folder.

    A dead cluster with a folder keeps its memory, since its jobs resume from the checkpoints there after the next
    ``everstep up``.

    Args:
        root: Folder of all clusters' shared memory; folders of other users are not touched.

    Returns:
        The folders that were removed.
    """
    candidates = [path for path in root.glob("*-" + "[0-9a-f]" * 8) if path.is_dir()]
    stale = [path for path in candidates if path.stat().st_uid == os.getuid() and not _has_home(path)]
    living = cluster_processes.cluster_ids() if stale else {}
    stale = [path for path in stale if path.name not in living]
    for path in stale:
        remove_shared_memory(path)
    return stale


def _has_home(shm: Path) -> bool:
    try:
        return Path((shm / HOME_FILE).read_text()).exists()
    except OSError:
        return False
