"""Text for people that many parts write alike."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from itertools import islice

LISTED = 8
"""The most values of a list that are named; the rest is counted."""
_ON_ANOTHER = re.compile(r"on \S+: ")
_BYTES = {0xDC00 + byte: f"\\x{byte:02x}" for byte in range(0x80, 0x100)}
"""Character for a byte that is no UTF-8 (PEP 383) → its text."""


def listed(values: Collection[object], most: int = LISTED, *, noun: str = "", separator: str = ", ") -> str:
    """A list as text: ``1, 2, 3``; of a long list the first values, and the number of the rest.

    Args:
        values: The values, in order.
        most: The most values that are named.
        noun: A plural for the rest, as in ``m0, m1 and 7 more machines``; empty: none is needed.
        separator: The text between values.
    """
    return first_of(islice(values, most), len(values), noun=noun, separator=separator)


def first_of(first: Iterable[object], count: int, *, noun: str = "", separator: str = ", ") -> str:
    """A list as text, like ``listed``, from its first values and its length."""
    texts = [str(value) for value in first]
    more = count - len(texts)
    return separator.join(texts) + (f" and {more} more{f' {noun}' if noun else ''}" if more > 0 else "")


def size_text(size: float) -> str:
    """A number of bytes: ``12.5 MB``, ``88.00 GB``."""
    return f"{size / 1e9:.2f} GB" if size >= 10**9 else f"{size / 1e6:.1f} MB"


def printable(text: str) -> str:
    """A text that can be sent: bytes that are no UTF-8, e.g. of a file's name, are written as ``\\xff``."""
    return text.translate(_BYTES).encode(errors="backslashreplace").decode()


def one_line(error: BaseException) -> str:
    """An error in one line, cut to 200 characters."""
    line = " ".join(str(error).split())
    return cut(line, 200)


def cut(text: str, most: int) -> str:
    """A text of at most so many characters."""
    return text if len(text) <= most else f"{text[: most - 2]} …"


def last_line(text: str, most: int = 120) -> str:
    """The last line of a text that is not empty, e.g. of a traceback, cut."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    line = lines[-1] if lines else ""
    return cut(line, most)


def error_line(text: str, most: int = 120) -> str:
    """The line of a failed trial that names the error, cut: its text may end with remarks and with other machines.

    Args:
        text: ``on m0: Traceback …``, the error, then lines such as ``(exit code 1)`` and ``on m3: another error``.
        most: The most characters.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    own = [line for place, line in enumerate(lines) if not (place and _ON_ANOTHER.match(line))]
    told = [line for line in own if not (line.startswith("(") and line.endswith(")"))]
    return last_line("\n".join(told or own), most)
