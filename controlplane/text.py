"""Numbers and times as text for people."""

from __future__ import annotations

from datetime import datetime

DASH = "-"
"""Stands for a value that is not known."""


def count(value: float | None) -> str:
    """A count in short form: 950, 12.3k, 4.56M."""
    if value is None:
        return DASH
    for limit, divisor, unit in ((1e4, 1, ""), (1e6, 1e3, "k"), (1e9, 1e6, "M"), (1e12, 1e9, "G")):
        if abs(value) < limit:
            return f"{value:.0f}" if divisor == 1 else f"{value / divisor:.3g}{unit}"
    return f"{value / 1e12:.3g}T"


def counted(number: int, noun: str) -> str:
    """A number with its noun: ``1 machine``, ``2 machines``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def per_second(value: float | None, what: str) -> str:
    """A speed: ``8.13 step/s``."""
    if value is None:
        return f"{DASH} {what}/s"
    return f"{count(value) if value >= 100 else f'{value:.3g}'} {what}/s"


def size(value: int) -> str:
    """A number of bytes in short form: 950 B, 12.3 kB, 4.56 GB."""
    for limit, unit in ((1e3, "B"), (1e6, "kB"), (1e9, "MB"), (1e12, "GB")):
        if value < limit:
            return f"{value} B" if unit == "B" else f"{value / (limit / 1e3):.3g} {unit}"
    return f"{value / 1e12:.3g} TB"


def ratio(value: float | None) -> str:
    """A ratio from 0 to 1 in percent."""
    return DASH if value is None else f"{100 * value:.1f} %"


def loss(value: float | None) -> str:
    """A loss with four decimals, so that a change from one step to the next is visible."""
    return DASH if value is None else f"{value:.4f}"


def duration(seconds: float | None) -> str:
    """A duration: 0.42 s, 12 s, 3 min 5 s, 2 h 4 min, 3 d 4 h."""
    if seconds is None:
        return DASH
    if seconds < 10:
        return f"{seconds:.2f} s"
    rounded = round(seconds)
    if rounded < 60:
        return f"{rounded} s"
    if rounded < 3600:
        return f"{rounded // 60} min {rounded % 60} s"
    if rounded < 86400:
        return f"{rounded // 3600} h {rounded % 3600 // 60} min"
    return f"{rounded // 86400} d {rounded % 86400 // 3600} h"


def clock(time_ns: int | None) -> str:
    """Local time of day with milliseconds; DASH if it is not known."""
    if not time_ns:
        return DASH
    return datetime.fromtimestamp(time_ns / 1e9).astimezone().strftime("%H:%M:%S.%f")[:-3]


def moment(when: datetime | None) -> str:
    """Local date and time to the second."""
    return DASH if when is None else when.astimezone().strftime("%Y-%m-%d %H:%M:%S")


def moment_ns(time_ns: int | None) -> str:
    """Local date and time to the second, of a time in nanoseconds since 1970; DASH if it is 0 or None."""
    return moment(datetime.fromtimestamp(time_ns / 1e9).astimezone() if time_ns else None)


def since(time_ns: int, start_ns: int | None) -> str:
    """The time since a start, such as ``+0.412 s``; ``+0.000 s`` if the start is not known."""
    return f"{(time_ns - (start_ns or time_ns)) / 1e9:+.3f} s"
