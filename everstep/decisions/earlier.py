"""From what a new run of a job's name may start: what an earlier run of it left on disk and remote storage."""

from __future__ import annotations

from collections.abc import Iterable

from everstep.decisions.restore import MEMORY
from everstep.errors import CheckpointError
from everstep.incident import Held
from everstep.topology import Topology


def left_by_earlier_run(held: Iterable[Held], topology: Topology, at: int | None = None) -> list[Held]:
    """The copies that may be chosen from.

    What is still in memory is none of them: an unclean end left it, and it is
    thrown away when the new run prepares its machines.

    Args:
        held: What the machines told of.
        topology: Of the new run.
        at: The step that it is to start from; None: not known yet.

    Raises:
        CheckpointError: the step was saved with other parallel sizes.
    """
    found = [one for one in held if one.tier not in MEMORY]
    theirs = {one.topology for one in found if one.completed_steps == at and one.valid and one.topology}
    fits = [one for one in found if one.topology in {"", str(topology)}]
    if theirs and str(topology) not in theirs:
        raise CheckpointError(
            f"step {at} was saved with the sizes {max(theirs)}, and the job has {topology} now (machines, ranks on "
            "each, tp, pp, order). Start it with the sizes that it had, or give the step's folder on disk to "
            "--resume-path"
        )
    return fits
