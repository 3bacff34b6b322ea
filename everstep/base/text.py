"""Text for people that many parts write alike."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from itertools import islice

LISTED = 8
"""So many of a list are named; the others are counted."""
_ON_ANOTHER = re.compile(r"on \S+: ")
_BYTES = {0xDC00 + byte: f"\\x{byte:02x}" for byte in range(0x80, 0x100)}
"""What stands for a byte that is no UTF-8 (PEP 383) → how it is written."""


def listed(values: Collection[object], most: int = LISTED, *, noun: str = "", separator: str = ", ") -> str:
    """``1, 2, 3``; of many only the first, and how many more.

    Args:
        values: In the order in which they are named.
        most: So many are named.
        noun: What the others are, in the plural: ``m0, m1 and 7 more machines``; empty: it goes without saying.
        separator: Between them.
    """
    return first_of(islice(values, most), len(values), noun=noun, separator=separator)


def first_of(first: Iterable[object], count: int, *, noun: str = "", separator: str = ", ") -> str:
    """The same, where only the first of ``count`` are at hand."""
    texts = [str(value) for value in first]
    more = count - len(texts)
    return separator.join(texts) + (f" and {more} more{f' {noun}' if noun else ''}" if more > 0 else "")


def size_text(size: float) -> str:
    """A number of bytes: ``12.5 MB``, ``88.00 GB``."""
    return f"{size / 1e9:.2f} GB" if size >= 10**9 else f"{size / 1e6:.1f} MB"


def printable(text: str) -> str:
    """The same text, as it can be sent: bytes that are no UTF-8, e.g. of a file's name, are written as ``\\xff``."""
    return text.translate(_BYTES).encode(errors="backslashreplace").decode()


def one_line(error: BaseException) -> str:
    """An error in one line, cut."""
    line = " ".join(str(error).split())
    return cut(line, 200)


def cut(text: str, most: int) -> str:
    """A text of at most so many characters."""
    return text if len(text) <= most else f"{text[: most - 2]} …"


def last_line(text: str, most: int = 120) -> str:
    """The last line of a text that says something, e.g. of a traceback, cut."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    line = lines[-1] if lines else ""
    return cut(line, most)


def what_went_wrong(text: str, most: int = 120) -> str:
    """The line of a refusal that says why, cut: what machines say of a trial ends with asides, and with other machines.

    Args:
        text: ``on m0: Traceback …``, the error, then lines such as ``(exit code 1)`` and ``on m3: another error``.
        most: Characters.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    own = [line for place, line in enumerate(lines) if not (place and _ON_ANOTHER.match(line))]
    told = [line for line in own if not (line.startswith("(") and line.endswith(")"))]
    return last_line("\n".join(told or own), most)
