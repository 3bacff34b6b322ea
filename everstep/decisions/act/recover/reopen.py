"""Prepares the next incident of a job whose incident was closed from outside: terminated, cancelled, deleted or failed.

The fault is still open, and the job keeps its machines and copies. Ranks that the closed incident had launched may
continue if they run. Otherwise the next incident handles the fault, and waits for an operator, since nobody has decided
how the job resumes.
"""

from __future__ import annotations

from everstep.model.incident import Left

FIRST_S = 1.0
LONGEST_S = 600.0
"""The first and the longest delay before the next incident, seconds; the delay doubles with each closed incident."""
UNKNOWN_LAUNCHES = 1000
"""A number of launches that no incident exceeds. It is assumed for an incident whose history is gone."""


def reopen_wait_s(closed: int) -> float:
    """Return the seconds to wait before the next incident; 0 the first time.

    Without this wait, a person or a program that closes every incident at once would fill up the histories of
    workflows.

    Args:
        closed: The number of incidents in a row that were closed from outside.
    """
    if closed <= 1:
        return 0.0
    return LONGEST_S if closed > 20 else min(FIRST_S * 2.0 ** (closed - 2), LONGEST_S)


def newest_generation(generation: int, left: Left) -> int:
    """Return the newest generation that may have been launched.

    If the history of the closed incident is gone, its launches are not known. Then many numbers are skipped, since a
    fenced number must not be used again.

    Args:
        generation: The newest generation that the job knows.
        left: The result of the closed incident.
    """
    if not left.known:
        return generation + UNKNOWN_LAUNCHES
    return max([generation, *(launched for launched, _ in left.launches)])


def newest_begin(resume_step: int, left: Left) -> int:
    """Return the step at which the newest generation began, which the closed incident may have launched.

    Args:
        resume_step: The step at which the newest generation that the job knows began.
        left: The result of the closed incident.
    """
    return left.resume_step if left.known and left.launches else resume_step


def hold_reason(incident: str, left: Left) -> str:
    """Return why the next incident waits for an operator."""
    lost = "" if left.known else "; its history is gone, and the steps that its launches saved are not used"
    return f"{incident} was {left.how}{lost}: resume lets the job continue, abandon gives it up"
