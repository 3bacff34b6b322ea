"""Which step a rank backs up next. Pure."""

from __future__ import annotations

from collections.abc import Collection


def choose_step(held: Collection[int], *, newest: int, every: int, resumed: int = -1) -> int | None:
    """The step to send, None: nothing to do.

    All machines must back up the same steps, or no step is complete everywhere,
    and they do not talk about it. Who keeps up sends every step. Who is behind
    sends the *roundest* of what it holds, the one with the most trailing zero
    bits, so that machines which are behind by different amounts still meet.

    Args:
        held: Steps in the own slots.
        newest: The newest step that the peer has; -1: none.
        every: ``backup_every_steps``; only its multiples count …
        resumed: … and the step from which the generation began, which a new peer may not have yet.
    """
    due = [step for step in held if step > newest and (step % every == 0 or step == resumed)]
    return max(due, key=lambda step: (roundness(step // every if step % every == 0 else 1), step), default=None)


def roundness(step: int) -> int:
    """Trailing zero bits; a step of 0 is as round as can be."""
    return (step & -step).bit_length() - 1 if step else 64
