"""Text from outside, e.g. the exception of a script, as a person may see it: it gives a terminal no commands."""

from __future__ import annotations

LONGEST = 2_000
"""Characters of one line (ours)."""


def clean(text: str) -> str:
    r"""The text without control characters, long lines cut; line breaks and tabs stay.

    What cannot be printed is shown as Python writes it: ``\x1b``, ``\u202e``.
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
    return "".join(char if char.isprintable() or char == "\t" else ascii(char)[1:-1] for char in line)
