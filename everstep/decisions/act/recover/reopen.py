"""The next incident of a job whose incident was closed from outside: terminated or cancelled by a person, or failed.

The fault is still open, and the job keeps everything that it holds. Ranks that the closed incident had launched, and
that run, may continue. Otherwise the next incident handles the fault and waits for an operator: closing the earlier
incident did not decide how the job resumes.
"""

from __future__ import annotations

from everstep.model.incident import Left

FIRST_S = 1.0
LONGEST_S = 600.0
"""The delay between two incidents of one fault that were closed from outside, seconds: doubled from the second on."""
UNKNOWN_LAUNCHES = 1000
"""More launches than an incident makes of which nothing is known any more."""


def reopen_wait_s(closed: int) -> float:
    """Return the seconds to wait before the next incident, after a number of incidents in a row were closed from
    outside: 0 the first time.

    A person or a program may close every incident at once: that must not fill histories.
    """
    if closed <= 1:
        return 0.0
    return LONGEST_S if closed > 20 else min(FIRST_S * 2.0 ** (closed - 2), LONGEST_S)


def newest_generation(generation: int, left: Left) -> int:
    """Return the newest generation that may have been launched, from the newest generation that the job knew of.

    If the history of an incident is gone, its launches are not known: numbers are left out, since a fenced number must
    not be used again.
    """
    if not left.known:
        return generation + UNKNOWN_LAUNCHES
    return max([generation, *(launched for launched, _ in left.launches)])


def newest_begin(resume_step: int, left: Left) -> int:
    """Return the step at which that generation began; ``resume_step``: the step of the newest known generation."""
    return left.resume_step if left.known and left.launches else resume_step


def hold_reason(incident: str, left: Left) -> str:
    """Why the next incident waits for an operator."""
    lost = "" if left.known else "; its history is gone, and what its launches saved is not used"
    return f"{incident} was {left.how}{lost}: resume lets the job go on, abandon gives it up"
