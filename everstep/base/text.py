"""Writes lists, sizes, errors and signals as text for people."""

from __future__ import annotations

import re
import signal
from collections.abc import Collection, Iterable
from itertools import islice

LISTED = 8
"""The most values of a list that are named; the remaining ones are counted."""
_ON_ANOTHER = re.compile(r"on \S+: ")
_BYTES = {0xDC00 + byte: f"\\x{byte:02x}" for byte in range(0x80, 0x100)}
"""Character that stands for a byte that is not UTF-8 (PEP 383) → the text that is written for it."""


def listed(values: Collection[object], most: int = LISTED, *, noun: str = "", separator: str = ", ") -> str:
    """A list as text, e.g. ``1, 2, 3``. For a long list, the text has the first values and the number of the others.

    Args:
        values: The values, in order.
        most: The most values that are named.
        noun: A plural for the values that are not named, as in ``m0, m1 and 7 more machines``; empty: no noun.
        separator: The text between values.
    """
    return first_of(islice(values, most), len(values), noun=noun, separator=separator)


def first_of(first: Iterable[object], count: int, *, noun: str = "", separator: str = ", ") -> str:
    """The text of ``listed``, from the first values of a list and the length of the list."""
    texts = [str(value) for value in first]
    more = count - len(texts)
    return separator.join(texts) + (f" and {more} more{f' {noun}' if noun else ''}" if more > 0 else "")


def size_text(size: float) -> str:
    """A number of bytes as text, e.g. ``12.5 MB`` or ``88.00 GB``."""
    return f"{size / 1e9:.2f} GB" if size >= 10**9 else f"{size / 1e6:.1f} MB"


def printable(text: str) -> str:
    """A text that can be sent: bytes that are not UTF-8, e.g. in a file's name, are written as ``\\xff``."""
    return text.translate(_BYTES).encode(errors="backslashreplace").decode()


def one_line(error: BaseException) -> str:
    """An error in one line, cut to 200 characters."""
    line = " ".join(str(error).split())
    return cut(line, 200)


def cut(text: str, most: int) -> str:
    """A text shortened to at most ``most`` characters."""
    return text if len(text) <= most else f"{text[: most - 2]} …"


def last_line(text: str, most: int = 120) -> str:
    """The last line of a text, e.g. of a traceback, that is not blank; shortened."""
    lines = _lines(text)
    return cut(lines[-1] if lines else "", most)


def error_line(text: str, most: int = 120) -> str:
    """The line that names the error of the first machine, from the text of a failed trial; shortened.

    Args:
        text: ``on m0: Traceback …``, the error, and perhaps lines such as ``(exit code 1)`` and ``on m3: other error``.
        most: The most characters.
    """
    lines = _lines(text)
    own = lines[:1] + [line for line in lines[1:] if not _ON_ANOTHER.match(line)]
    errors = [line for line in own if not (line.startswith("(") and line.endswith(")"))]
    return last_line("\n".join(errors or own), most)


def signal_name(number: int) -> str:
    """``SIGKILL`` for 9; ``signal 47`` for a number without a name, as most real-time signals are."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]
