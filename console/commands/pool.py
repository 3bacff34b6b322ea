"""``everstep evict`` and ``everstep release``: an operator takes a machine away from jobs, and lets it come back."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

Named = Annotated[list[str], typer.Argument(metavar="MACHINE...", help="Names, as 'everstep machines' shows them.")]
Cluster = Annotated[str, typer.Option("--cluster", metavar="NAME", help="Local cluster.")]


def evict(
    machines: Named,
    reason: Annotated[str, typer.Option("--reason", help="For whoever asks later.")],
    cluster: Cluster = "default",
) -> None:
    """Keep machines away from jobs. One that a job has leaves it as soon as there is another for it.

    A machine that no job has is cordoned at once. Where a job has it, the job goes on until a standby, or a free
    machine, can take its place; it is restarted with that one then, from its newest step.

    In Temporal's Web UI the same is the update `evict` of the workflow
    `pool/<task queue>`: {"machine": "m3", "operator": "you", "reason": "why"}.

    Examples:

        everstep evict m3 --reason "its fan is loud"

    Exit codes: 0 done; 2 no such machine; 3 no cluster.
    """
    from console.commands.exit_codes import finish

    finish(_move("evict", machines, reason, cluster))


def release(
    machines: Named,
    reason: Annotated[str, typer.Option("--reason", help="For whoever asks later.")] = "",
    cluster: Cluster = "default",
) -> None:
    """Let jobs have machines again that were evicted or cordoned.

    A machine that everstep evicted is tested in quarantine, and comes back by itself once it has passed, unless it was
    evicted twice within a day. This does not wait for that. Where a finding of the monitor still stands, e.g. an Xid in
    the kernel log, 'everstep machines MACHINE --clear REASON' ends it.

    Examples:

        everstep release m3 --reason "new fan"

    Exit codes: 0 done; 2 no such machine; 3 no cluster.
    """
    from console.commands.exit_codes import finish

    finish(_move("release", machines, reason, cluster))


async def _move(what: Literal["evict", "release"], machines: list[str], reason: str, cluster: str) -> int:
    from controlplane.client import Control
    from controlplane.machine_pool import move_machine

    async with await Control.connect(cluster) as control:
        for machine in machines:
            print(await move_machine(control, what, machine, reason))
    return 0
