"""Chooses the next step that a machine writes to disk, or sends to a peer.

All machines of a job have to copy the same steps, since otherwise no step is complete. But the machines do not talk to
each other about steps. So a step is due only by its number (``disk_every_steps`` or ``backup_every_steps``), or if the
watchers requested it from all machines (``Persist``). A machine that is too slow copies every 2nd, 4th, … due step, so
its steps are also steps of every faster machine.

If a machine can choose among several steps to send, it sends the *roundest* step, i.e. the step with the most trailing
zero bits. So machines that lag by different amounts choose the same step. If the job hangs, the distance between due
steps is one again, since its last step has to be backed up.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

Held = Mapping[int, Sequence[int]]
"""Rank of this machine → the steps in its own slots."""


@dataclass(frozen=True, slots=True)
class NextDiskStep:
    """The next step to write to disk, with the reason."""

    step: int | None
    """The step to write now for all ranks of this machine; None: no step."""
    reason: str
    gone: Mapping[int, str]
    """Requested steps that cannot be written any more → the reason."""


def is_due(step: int, every: int, stride: int = 1) -> bool:
    """Return whether a step is a multiple of ``every`` times ``stride``; if ``every`` is 0, no step is due."""
    return every > 0 and step > 0 and step % (every * stride) == 0


def next_disk_step(held: Held, *, every: int, stride: int, asked: Collection[int], done: int) -> NextDiskStep:
    """Return the step that this machine writes next.

    A step can be written if every rank either has it or has not reached it yet. Requested steps are written first, the
    oldest of them first, since slots are overwritten in that order. After them, the newest step that is due by its
    number is written.

    Args:
        held: The steps in the own slots of this machine's ranks.
        every: The setting ``disk_every_steps``; 0: only requested steps are written.
        stride: The result of ``stride_after``.
        asked: Requested steps that are not written yet.
        done: The newest step that was written or given up; a step that is due by its number has to be later.
    """
    newest = {rank: max(steps, default=-1) for rank, steps in held.items()}
    reached = {step for steps in held.values() for step in steps}

    def without(step: int) -> list[int]:
        """Return the ranks that have passed the step and do not have it."""
        return [rank for rank, steps in held.items() if step not in steps and newest[rank] > step]

    gone = {
        step: f"step {step} was requested, and rank {late[0]}, now at step {newest[late[0]]}, does not have it any more"
        for step in sorted(asked)
        if (late := without(step))
    }
    for step in sorted(asked):
        if step in reached and step not in gone:
            return NextDiskStep(step, f"step {step} was requested", gone)
    for step in sorted(reached, reverse=True):
        if step > done and is_due(step, every, stride) and not without(step):
            return NextDiskStep(step, f"step {step} is a multiple of {every * stride}", gone)
    return NextDiskStep(None, "no step is due", gone)


def stride_after(every: int, lasted: int) -> int:
    """Return the stride with which a machine keeps up: the smallest sufficient power of two, in due steps.

    Args:
        every: The setting ``disk_every_steps``.
        lasted: The number of steps that training completed while the machine wrote one step.
    """
    stride = 1
    while every * stride <= lasted:
        stride *= 2
    return stride


def next_step_to_send(
    held: Mapping[int, Collection[int]], sent: Mapping[int, int], *, every: int, stride: int = 1, resumed: int = -1
) -> int | None:
    """Return the step to send to a peer, for all ranks that have it and have not sent it; None: no step.

    A step can be sent if every rank either has it, has sent it, or has not reached it yet.

    Args:
        held: Rank with this peer → the steps in its own slots.
        sent: Rank with this peer → the newest step at the peer; -1: none.
        every: The setting ``backup_every_steps``.
        stride: The distance between the steps to send, in due steps; the result of ``next_stride``.
        resumed: The step at which the generation began; it is always due, since a new peer may not have it yet.
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
    """Return the stride after another step was sent; it at most doubles, so that one delay has little effect.

    Args:
        stride: The stride before.
        every: The setting ``backup_every_steps``.
        lasted: The number of steps that were saved while the step was sent.
    """
    return min(2 * stride, stride_after(every, lasted))


def roundness(step: int) -> int:
    """Return the number of trailing zero bits of a step; the step 0 is the roundest."""
    return (step & -step).bit_length() - 1 if step else 64
