"""What steady progress is: one measure for whatever asks whether something was got over.

Whether a failure is solved, whether a version of the code runs well, whether what was tried still counts.
"""

from __future__ import annotations

from everstep.model.recovery_policy import RecoveryPolicy


def is_steady(steps: int | None, seconds: float, policy: RecoveryPolicy) -> bool:
    """Whether a job made steady progress: far enough, and for long enough.

    Args:
        steps: Past the place where it failed, or where something began; None: a script shows none, and only time can
            tell.
        seconds: That it ran for without a failure.
        policy: Both limits.
    """
    return seconds >= policy.progress.steady_s and (steps is None or steps >= policy.progress.steady_steps)
