"""Which step a machine sends to a peer next. Pure.

All machines must back up the same steps, or no step is complete everywhere, and
they do not talk about it. A machine that keeps up sends every step. One that is behind
doubles the distance until it keeps up, so that its steps are a part of what every
faster machine sends. Where it still has a choice, it takes the *roundest* step,
the one with the most trailing zero bits: others that are behind by a different
amount choose that one too. Where the job stands still, e.g. in a hang, the
distance is one again: its last step is the one that has to be backed up.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from everstep.decisions.keep.next_disk_step import stride_after


def choose_step(
    held: Mapping[int, Collection[int]], sent: Mapping[int, int], *, every: int, stride: int = 1, resumed: int = -1
) -> int | None:
    """The step to send for all ranks that hold it and have not sent it; None: nothing to do.

    A step is chosen when each rank either holds it, has sent it, or has yet to reach it.

    Args:
        held: For each rank that has this peer, the steps in its own slots.
        sent: For each of them the newest step that the peer has; -1: none.
        every: ``backup_every_steps``.
        stride: Every which multiple of that; from ``next_stride``.
        resumed: The step from which the generation began: it counts too, for a new peer may not have it yet.
    """
    newest = {rank: max(steps, default=-1) for rank, steps in held.items()}

    def possible(step: int) -> bool:
        return all(step in held[rank] or sent[rank] >= step or newest[rank] < step for rank in held)

    due = {
        step
        for rank, steps in held.items()
        for step in steps
        if step > sent[rank] and (step % (every * stride) == 0 or step == resumed) and possible(step)
    }
    return max(due, key=lambda step: (roundness(step // every if step % every == 0 else 1), step), default=None)


def next_stride(stride: int, every: int, lasted: int) -> int:
    """The stride after one more step was sent.

    It grows by doubling only, so that a single delay does not cost more than one step more.

    Args:
        stride: Until now.
        every: ``backup_every_steps``.
        lasted: Steps that were saved while it was sent.
    """
    return min(2 * stride, stride_after(every, lasted))


def roundness(step: int) -> int:
    """Trailing zero bits; a step of 0 is as round as can be."""
    return (step & -step).bit_length() - 1 if step else 64
