"""Text from outside, e.g. the exception of a script, as a person may see it: it gives a terminal no commands."""

from __future__ import annotations

import unicodedata

LONGEST = 2_000
"""Characters of one line."""


def clean(text: str) -> str:
    r"""The text without control characters, long lines cut; line breaks and tabs stay.

    What cannot be printed is shown as Python writes it: ``\x1b``, ``\u202e``. Spaces of other widths, and those at
    which no line may be broken, become plain ones.
    """
    return "\n".join(_line(line) for line in text.split("\n"))


def clean_line(text: str) -> str:
    """The same in one line."""
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
