"""What a job does when its incident was closed from outside: terminated or cancelled by a person, or failed.

The fault is as open as before, and everything that the job holds stays. Where
the closed incident had launched ranks that run, they may go on. Else the next
incident takes the fault over, and waits for an operator: who closed the other one
did not say how the job is to go on.
"""

from __future__ import annotations

from everstep.model.incident import Left

FIRST_S = 1.0
LONGEST_S = 600.0
"""Between two incidents of one fault that were closed from outside, seconds: doubled from the second on."""
UNKNOWN_LAUNCHES = 1000
"""More launches than an incident makes of which nothing is known any more."""


def reopen_wait_s(closed: int) -> float:
    """Seconds before the next incident, after so many in a row were closed from outside: none the first time.

    Somebody, or something, may close every incident at once: that must not fill histories.
    """
    if closed <= 1:
        return 0.0
    return LONGEST_S if closed > 20 else min(FIRST_S * 2.0 ** (closed - 2), LONGEST_S)


def newest_generation(generation: int, left: Left) -> int:
    """The newest generation that may have been launched, given the newest that the job knew of.

    Of an incident whose history is gone it is not known what it launched: numbers
    are left out, since a fenced one must not be used again.
    """
    if not left.known:
        return generation + UNKNOWN_LAUNCHES
    return max([generation, *(launched for launched, _ in left.launches)])


def newest_begin(resume_step: int, left: Left) -> int:
    """Where that generation began; ``resume_step``: where the newest one did that the job knew of."""
    return left.resume_step if left.known and left.launches else resume_step


def hold_reason(incident: str, left: Left) -> str:
    """Why the next incident waits for an operator."""
    lost = "" if left.known else "; its history is gone, and what its launches saved is not used"
    return f"{incident} was {left.how}{lost}: resume lets the job go on, abandon gives it up"
