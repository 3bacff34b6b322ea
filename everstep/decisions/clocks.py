"""Converts times of several machines' clocks to one clock.

Clocks that are kept (NTP) agree to milliseconds, and what they say is better than what the delay of messages lets one
guess. One that is not may be off by days. So a machine's times are changed only when its clock is off for certain: when
it says that it answered before it was asked, or after the answer was heard.
"""

from __future__ import annotations

SLACK_S = 1.0
"""A clock may be off by this much and is believed: then the order of two ends on two machines is no better."""
LATE_S = 10.0
"""What a stream brings was said at most so long ago."""


def shift_ns(told_ns: int, *, asked_ns: int, heard_ns: int) -> int:
    """What to add to a machine's times to have them by our clock; 0: its clock may be right.

    Args:
        told_ns: Its clock when it answered; 0: it did not say.
        asked_ns: Our clock when it was asked.
        heard_ns: Our clock when the answer was there. What is added is right but for the time that it was under way.
    """
    slack_ns = round(SLACK_S * 1e9)
    if not told_ns or asked_ns - slack_ns <= told_ns <= heard_ns + slack_ns:
        return 0
    return heard_ns - told_ns


def stream_shift_ns(told_ns: int, heard_ns: int) -> int:
    """What to add to the times of a message of a stream, which is no answer to a request."""
    return shift_ns(told_ns, asked_ns=heard_ns - round(LATE_S * 1e9), heard_ns=heard_ns)
