"""Reads Python tracebacks: the name of the exception, and its position in the user's code."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

HEADER = "Traceback (most recent call last)"
CHAINED = (
    "During handling of the above exception",
    "The above exception was the direct cause",
)
_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+)(?:, in (?P<name>.+))?')
_EXCEPTION = re.compile(r"^((?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*)(?::(?=\s|$)|$)")
_LIBRARY = re.compile(
    r"site-packages/|dist-packages/|/lib/python\d|/lib64/python\d|^<frozen|^<string>|^<__array_function__"
    r"|/bin/torchrun$|/bin/\w+run$"
    r"|\.pyx$|/importlib/|(?:^|/)everstep/(?:training|faults)"
)


@dataclass(frozen=True, slots=True)
class Frame:
    """A position in a program."""

    file: str
    line: int
    function: str

    @property
    def text(self) -> str:
        """``train.py:26 in main``, with the path as it was printed."""
        return f"{self.file}:{self.line}" + (f" in {self.function}" if self.function else "")


def exception_name(text: str) -> str:
    """Return the exception that a line begins with: ``KeyError`` for ``KeyError: 'a'``; empty if there is none."""
    found = _EXCEPTION.match(text)
    return found[1] if found else ""


def user_frame(block: Sequence[str]) -> Frame | None:
    """Return the innermost frame of a traceback that is not in a library; None if there is no such frame.

    Args:
        block: The lines of the traceback, without prefixes.
    """
    found = None
    for line in block:
        frame = _FRAME.match(line)
        if frame and not _LIBRARY.search(frame["file"]):
            found = Frame(frame["file"], int(frame["line"]), (frame["name"] or "").strip())
    return found


def innermost(block: Sequence[str]) -> str:
    """Return the innermost frame of a traceback and its source, as one line; empty if there is no frame."""
    last = max((at for at, line in enumerate(block) if _FRAME.match(line)), default=None)
    return "" if last is None else " ".join(line.strip() for line in block[last:])
