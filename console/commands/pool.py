"""``everstep evict`` and ``everstep release``: an operator keeps machines away from jobs, or lets jobs have them."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from console.commands.shared import ClusterOption, finish

Names = Annotated[list[str], typer.Argument(metavar="MACHINE...", help="Names, as 'everstep machines' shows them.")]


def evict(
    machines: Names,
    reason: Annotated[str, typer.Option("--reason", help="The reason for the command; it is kept with the machine.")],
    cluster: ClusterOption = "default",
) -> None:
    """Keep machines away from jobs. A job keeps its machine until another machine can replace it.

    A machine that no job has is cordoned at once. If a job has the machine, the job continues until a standby or a
    free machine can replace it. Then the job is restarted with the new machine, from its newest step.

    In Temporal's Web UI the update `evict` of the workflow `pool/<task queue>` does the same:
    {"machine": "m3", "operator": "you", "reason": "why"}.

    Examples:

        everstep evict m3 --reason "its fan is loud"

    Exit codes: 0 done; 2 no such machine; 3 no cluster.
    """
    finish(_move("evict", machines, reason, cluster))


def release(
    machines: Names,
    reason: Annotated[
        str, typer.Option("--reason", help="The reason for the command; it is kept with the machine.")
    ] = "",
    cluster: ClusterOption = "default",
) -> None:
    """Let jobs have evicted or cordoned machines again.

    A machine that everstep evicted is tested in quarantine, and returns by itself once it has passed, unless it was
    evicted twice within a day. 'everstep release' does not wait for these tests. If the machine still has an active
    finding, e.g. an Xid in the kernel log, end the finding with 'everstep machines MACHINE --clear REASON'.

    Examples:

        everstep release m3 --reason "new fan"

    Exit codes: 0 done; 2 no such machine; 3 no cluster.
    """
    finish(_move("release", machines, reason, cluster))


async def _move(update: Literal["evict", "release"], machines: list[str], reason: str, cluster: str) -> int:
    from controlplane.client import Control
    from controlplane.machine_pool import move_machine

    async with await Control.connect(cluster) as control:
        for machine in machines:
            print(await move_machine(control, update, machine, reason))
    return 0
