"""The next step that a machine writes to disk, or sends to a peer.

All machines of a job must write, and send, the same steps, or no step is complete for all ranks, and they do not talk
about it. So a step is due by its number alone: every ``disk_every_steps``-th (or ``backup_every_steps``-th), and each
step that a ``Persist`` requested from all machines. A machine that is too slow does not use whichever step is newest
when it is ready, but doubles the distance until it keeps up: its steps are then a part of the steps of every faster
machine.

If a machine that sends still has a choice, it sends the *roundest* step, the step with the most trailing zero bits:
machines that are behind by a different amount choose the same step. If the job makes no steps, e.g. in a hang, the
distance is one again: its last step is the one that has to be backed up.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

Held = Mapping[int, Sequence[int]]
"""For each rank of this machine the steps in its own slots; none if nothing was saved yet."""


@dataclass(frozen=True, slots=True)
class NextDiskStep:
    """The step to write, or none, with the reason."""

    step: int | None
    """The step to write now for all ranks of this machine; None: none."""
    reason: str
    gone: Mapping[int, str]
    """Steps that were asked for and can be written no more, each with the reason."""


def is_due(step: int, every: int, stride: int = 1) -> bool:
    """Return whether a step is written by its number: multiples of ``every`` times ``stride``; ``every`` 0: none."""
    return every > 0 and step > 0 and step % (every * stride) == 0


def next_disk_step(held: Held, *, every: int, stride: int, asked: Collection[int], done: int) -> NextDiskStep:
    """Return the step that this machine writes next.

    A step can be written when every rank either holds it or has yet to reach it. Steps that were asked for go first,
    the oldest first, since they are overwritten first; then the newest that is due by its number.

    Args:
        held: The steps in the own slots of this machine's ranks.
        every: ``disk_every_steps``; 0: only what is asked for.
        stride: The result of ``stride_after``.
        asked: Steps that a Persist asked for and that are not written yet.
        done: The newest step that is written, or was given up; steps due by number up to it are not looked at again.
    """
    newest = {rank: max(steps, default=-1) for rank, steps in held.items()}
    reached = {step for steps in held.values() for step in steps}

    def without(step: int) -> list[int]:
        return [rank for rank, steps in held.items() if step not in steps and newest[rank] > step]

    gone = {
        step: f"step {step} was asked for and rank {late[0]}, now at step {newest[late[0]]}, holds it no more"
        for step in sorted(asked)
        if (late := without(step))
    }
    for step in sorted(asked):
        if step in reached and step not in gone:
            return NextDiskStep(step, f"step {step} was asked for", gone)
    for step in sorted(reached, reverse=True):
        if step > done and is_due(step, every, stride) and not without(step):
            return NextDiskStep(step, f"step {step} is a multiple of {every * stride}", gone)
    return NextDiskStep(None, "no step is due", gone)


def stride_after(every: int, lasted: int) -> int:
    """Return the distance in due steps with which a machine keeps up: the smallest power of two that is enough.

    Args:
        every: ``disk_every_steps``.
        lasted: Steps that training completed while the machine wrote one.
    """
    stride = 1
    while every * stride <= lasted:
        stride *= 2
    return stride


def next_step_to_send(
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
    """Return the stride after a further step was sent.

    It grows by doubling only, so that a single delay does not cost more than one step more.

    Args:
        stride: The stride until now.
        every: ``backup_every_steps``.
        lasted: Steps that were saved while it was sent.
    """
    return min(2 * stride, stride_after(every, lasted))


def roundness(step: int) -> int:
    """Trailing zero bits; a step of 0 is as round as can be."""
    return (step & -step).bit_length() - 1 if step else 64
