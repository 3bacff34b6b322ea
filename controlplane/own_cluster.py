"""The list of machines for a worker's machine pool, and the way in which it can grow."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from activities.clusters.cluster import Cluster, ListedCluster, Listing
from activities.notices import program
from controlplane.inventory import load
from controlplane.local.cluster_file import ClusterFile
from controlplane.local.grow import grow
from everstep.errors import ClusterError, ConfigError, NoticeError
from everstep.rank.environment import CLUSTER_NAME, INVENTORY

PROVISION_S = 50.0
"""Time limit for the site's program that adds machines, seconds; the machines may arrive later."""


def own_cluster() -> Cluster | None:
    """The local cluster, or the inventory, that the environment of this worker names.

    Returns:
        None: the environment names neither; then the machine pool learns machines from jobs.
    """
    if name := os.environ.get(CLUSTER_NAME):
        return ListedCluster(lambda: _of_file(name), lambda machines: asyncio.to_thread(grow, name, machines))
    if not (named := os.environ.get(INVENTORY)):
        return None
    path = Path(named)
    return ListedCluster(lambda: _of_inventory(path), lambda machines: _run_program(path, machines))


def _of_file(name: str) -> Listing:
    file = ClusterFile.load(name)
    return Listing(file.machines, file.standbys, file.at_most)


def _of_inventory(path: Path) -> Listing:
    inventory = load(path)
    return Listing(inventory.machines, inventory.standbys, inventory.at_most)


async def _run_program(path: Path, machines: int) -> None:
    """Run the site's program that adds machines to the inventory."""
    inventory = await asyncio.to_thread(load, path)
    if machines > inventory.at_most:
        raise ConfigError(f"{machines} machines are more than at_most = {inventory.at_most} in the inventory {path}")
    if machines <= len(inventory.machine):
        return
    try:
        await program.run([*inventory.provision, str(machines)], b"", PROVISION_S)
    except NoticeError as error:
        raise ClusterError(f"the program 'provision' of the inventory {path} failed: {error}") from error
