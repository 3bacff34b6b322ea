"""Which rank reads for the others of its data-parallel group."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from everstep.model.incident import CopyToRestore, Tier
from everstep.model.topology import Topology


def readers(
    copies: Iterable[CopyToRestore], digests: Mapping[int, str], topology: Topology, *, disk_shared: bool = False
) -> dict[int, int]:
    """Rank → the rank that reads its tensors from the storage for it; ranks that read for themselves are left out.

    Ranks of a data-parallel group hold equal tensors, so that storage which all
    machines share need not send them once for each: one rank of the group reads,
    the others get them from it (MegaScale). Equal is
    what has equal digests; without one a rank reads for itself.

    Args:
        copies: What is to be restored.
        digests: Rank → digest of its copy's tensors.
        topology: The job's.
        disk_shared: The folder of disk checkpoints is shared too; else each machine reads its own disk.
    """
    shared = {Tier.REMOTE, Tier.DISK} if disk_shared else {Tier.REMOTE}
    alike: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for copy in copies:
        digest = digests.get(copy.rank, "")
        if copy.tier in shared and digest:
            first = topology.first_along(copy.rank, topology.data_axes)
            alike[first, copy.tier, copy.completed_steps, digest].append(copy.rank)
    return {rank: first for ranks in alike.values() for first in [min(ranks)] for rank in ranks if rank != first}
