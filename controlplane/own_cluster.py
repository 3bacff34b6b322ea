"""The cluster that a worker is of: what lists its machines."""

from __future__ import annotations

import os
from pathlib import Path

from activities.clusters.cluster import Listing
from activities.clusters.listed import ListedCluster
from controlplane.inventory import VARIABLE, load
from controlplane.local.cluster_file import ClusterFile

LOCAL = "EVERSTEP_CLUSTER_NAME"
"""Name of the local cluster that a worker belongs to."""


def own_cluster() -> ListedCluster | None:
    """What lists the machines of this worker's cluster: its local cluster, or the inventory that the environment names.

    Returns:
        None: neither is named; then the pool knows the machines that jobs name.
    """
    if name := os.environ.get(LOCAL):
        return ListedCluster(lambda: _of_file(name))
    path = os.environ.get(VARIABLE)
    return ListedCluster(lambda: _of_inventory(Path(path))) if path else None


def _of_file(name: str) -> Listing:
    file = ClusterFile.load(name)
    return Listing(file.machines, file.standbys)


def _of_inventory(path: Path) -> Listing:
    inventory = load(path)
    return Listing(inventory.machines, inventory.standbys)
