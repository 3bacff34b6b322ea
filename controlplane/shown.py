"""Makes text from outside, such as an exception of a script, safe for a terminal."""

from __future__ import annotations

import unicodedata

LONGEST = 2_000
"""Longest line that is shown, characters."""


def clean(text: str) -> str:
    r"""The text without control characters and with long lines cut; line breaks and tabs stay.

    Characters that cannot be printed become Python's escapes, such as ``\x1b``. All other kinds of spaces become plain
    spaces.
    """
    return "\n".join(_line(line) for line in text.split("\n"))


def clean_line(text: str) -> str:
    """The text as :func:`clean` returns it, in one line."""
    return _line(" ".join(text.splitlines()))


def _line(line: str) -> str:
    if len(line) > LONGEST:
        line = f"{line[:LONGEST]} … ({len(line) - LONGEST} more characters)"
    if line.isprintable():
        return line
    return "".join(map(_shown, line))


def _shown(char: str) -> str:
    if char.isprintable() or char == "\t":
        return char
    return " " if unicodedata.category(char) == "Zs" else ascii(char)[1:-1]
