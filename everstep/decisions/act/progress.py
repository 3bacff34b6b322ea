"""Judges the progress of a job after failures: whether it is steady, and which earlier failures are not solved yet."""

from __future__ import annotations

from collections.abc import Sequence

from everstep.model.incident import STILL_RUNNING, Failure
from everstep.model.recovery_policy import RecoveryPolicy


def is_steady(steps: int | None, seconds: float, policy: RecoveryPolicy) -> bool:
    """Return whether a job made steady progress: enough steps, and enough time.

    Args:
        steps: Steps past the failure, or past the start of a version; None: the script shows no steps, and only the
            time counts.
        seconds: Seconds that the job ran without a failure.
        policy: The policy with both limits.
    """
    return seconds >= policy.progress.steady_s and (steps is None or steps >= policy.progress.steady_steps)


BEFORE_ANY_STEP = "before any step was shown"
"""The position of a failure if its process showed no step."""


def position_of(failure: Failure) -> str:
    """Describe the position at which a job failed; empty: not known.

    If a script does not number its steps, the position is the number of steps of its process.
    """
    if failure.step >= 0:
        return f"at step {failure.step}"
    if failure.shown > 0:
        return f"after {failure.shown} steps of its process"
    return BEFORE_ANY_STEP if failure.shown == 0 else ""


def is_same_fault(failure: Failure, other: Failure) -> bool:
    """Return whether two failures are the same fault: the same cause, at the same position."""
    return failure.cause == other.cause and position_of(failure) == position_of(other) != ""


def still_counting(failures: Sequence[Failure], failure: Failure, policy: RecoveryPolicy) -> list[Failure]:
    """Return the earlier failures that still count together with a new failure: those that are not solved.

    A failure is solved once the job made steady progress past its position. A failure that is blamed on a handled
    machine does not interrupt that progress. Such a failure is itself solved after enough steps or after enough time,
    since machines fail often in a large job. A failure that returns at the same position was not solved. If a script
    shows no steps, only the time counts.

    Args:
        failures: Failures that counted so far, oldest first.
        failure: The new failure.
        policy: The policy with the limits of steady progress.
    """
    if not failures:
        return []
    unclear = [earlier for earlier in failures if not _is_explained(earlier)]
    return [
        earlier
        for position, earlier in enumerate(failures)
        if not _is_over(earlier, unclear[-1] if earlier in unclear else None, failures[-1], failure, policy)
        or _is_back(earlier, failures[position + 1 :], failure)
    ]


def steps_past(earlier: Failure, failure: Failure) -> int | None:
    """Return how many steps the job made past the position of an earlier failure; None: not known."""
    if failure.step >= 0:
        return failure.step - max(earlier.step, 0)
    return failure.shown if failure.shown > 0 else None


def seconds_since(earlier: Failure, failure: Failure) -> float:
    """Return how many seconds the job ran since it stepped again after an earlier failure; 0: not known."""
    began_ns = earlier.over_ns or earlier.time_ns
    return max(failure.time_ns - began_ns, 0) / 1e9 if began_ns else 0.0


def _is_over(
    earlier: Failure, last_unclear: Failure | None, last: Failure, failure: Failure, policy: RecoveryPolicy
) -> bool:
    """Return whether an earlier failure is solved.

    If ``last_unclear`` is None, either enough steps or enough time solves it; otherwise both are needed.
    """
    if last_unclear is None:
        steps, seconds = steps_past(last, failure), seconds_since(last, failure)
        enough_steps = steps is not None and steps >= policy.progress.steady_steps
        return enough_steps or (last.time_ns > 0 and seconds >= policy.progress.steady_s)
    past = [steps for before in (earlier, last_unclear) if (steps := steps_past(before, failure)) is not None]
    return is_steady(min(past, default=None), seconds_since(last_unclear, failure), policy)


def _is_explained(failure: Failure) -> bool:
    return failure.explained or failure.symptom in STILL_RUNNING


def _is_back(earlier: Failure, later: Sequence[Failure], failure: Failure) -> bool:
    """Return whether the current failure repeats an earlier one, and the job never passed its position in between."""
    if position_of(failure) == BEFORE_ANY_STEP:
        return False
    return is_same_fault(earlier, failure) and not any(_went_beyond(between, earlier) for between in later)


def _went_beyond(later: Failure, earlier: Failure) -> bool:
    """Return whether the job had passed the position of an earlier failure when it failed later."""
    if later.step >= 0 and earlier.step >= 0:
        return later.step > earlier.step
    return later.shown > earlier.shown >= 0
