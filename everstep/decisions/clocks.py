"""Converts times of several machines' clocks to one clock.

Clocks that are synchronized (NTP) agree to milliseconds. Their times are better than a correction that is guessed from
the delay of a message. A clock that is not synchronized may be off by days. So a machine's times are corrected only if
its clock is certainly off: it shows a time before the request was sent, or after the answer arrived.
"""

from __future__ import annotations

SLACK_S = 1.0
"""A clock that is off by at most this much, seconds, is not corrected."""
LATE_S = 10.0
"""A message of a stream is at most this old when it arrives, seconds."""


def shift_ns(answered_ns: int, *, asked_ns: int, heard_ns: int) -> int:
    """Return what to add to a machine's times to convert them to our clock; 0 if its clock may be right.

    The error of a correction is the time that the answer was under way.

    Args:
        answered_ns: The time of the machine's clock when it answered; 0: not known.
        asked_ns: The time of our clock when the request was sent.
        heard_ns: The time of our clock when the answer arrived.
    """
    slack_ns = round(SLACK_S * 1e9)
    if not answered_ns or asked_ns - slack_ns <= answered_ns <= heard_ns + slack_ns:
        return 0
    return heard_ns - answered_ns


def stream_shift_ns(sent_ns: int, heard_ns: int) -> int:
    """Return what to add to the times of a stream's message, which answers no request."""
    return shift_ns(sent_ns, asked_ns=heard_ns - round(LATE_S * 1e9), heard_ns=heard_ns)
