"""Which step a machine writes to disk next, and which it lets go. Pure.

All machines of a job must write the same steps, or no step is complete for all
ranks, and they do not talk about it. So a step is due by its number alone:
every ``disk_every_steps``-th, and those that a ``Persist`` asked all machines
for. A machine whose disk is too slow for that does not take what happens to
come when it is ready, but doubles the distance until it keeps up: its steps are
then a part of what every faster machine writes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

Held = Mapping[int, Sequence[int]]
"""For each rank of this machine the steps in its own slots; none when nothing was saved yet."""


@dataclass(frozen=True, slots=True)
class NextDiskStep:
    """What to write, with the reason, "nothing" included."""

    step: int | None
    """The step to write now for all ranks of this machine; None: none."""
    reason: str
    gone: Mapping[int, str]
    """Steps that were asked for and can be written no more, each with the reason."""


def is_due(step: int, every: int, stride: int = 1) -> bool:
    """Whether a step is written by its number: multiples of ``every`` times ``stride``; ``every`` 0: none."""
    return every > 0 and step > 0 and step % (every * stride) == 0


def choose_step(held: Held, *, every: int, stride: int, asked: Collection[int], done: int) -> NextDiskStep:
    """The step that this machine writes next.

    A step can be written when every rank either holds it or has yet to reach
    it. Steps that were asked for go first, the oldest first, since they are
    overwritten first; then the newest that is due by its number.

    Args:
        held: What the ranks of this machine have in their own slots.
        every: ``disk_every_steps``; 0: only what is asked for.
        stride: From ``stride_after``.
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
    """How many due steps make one that a machine can keep up with: the smallest power of two that suffices.

    Args:
        every: ``disk_every_steps``.
        lasted: Steps that training completed while the machine wrote one.
    """
    stride = 1
    while every * stride <= lasted:
        stride *= 2
    return stride
