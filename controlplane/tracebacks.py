"""Tracebacks for logs: plain, without the values of variables and without secrets, and never long.

A log line is written in the event loop. Rendered with locals, one error in a
workflow of 1,000 machines was 71,000 lines and held a worker for a minute.
"""

from __future__ import annotations

import traceback
from typing import TextIO

from structlog.typing import ExcInfo

from everstep.base.redaction import masked

FRAMES = 30
"""Number of frames for each exception, those nearest to the raise."""
CHAINED = 8
"""Number of exceptions in a chain, the newest."""
GROUP = 8
"""Number of exceptions in a group, and depth of nested groups."""
HEAD, TAIL = 4_000, 12_000
"""Characters that are kept of a long text, from its beginning and its end."""


def bounded(text: str) -> str:
    """The text, or its beginning and end with the number of characters left out."""
    left_out = len(text) - HEAD - TAIL
    return text if left_out <= 0 else f"{text[:HEAD]}\n[... {left_out} characters are left out ...]\n{text[-TAIL:]}"


def render(exc_info: ExcInfo) -> str:
    """The traceback of an exception as text."""
    kind, error, trace = exc_info
    shown = traceback.TracebackException(
        kind, error, trace, limit=-FRAMES, max_group_width=GROUP, max_group_depth=GROUP, compact=True
    )
    _shorten(shown)
    return bounded(masked("".join(shown.format()).rstrip("\n")))


def write(stream: TextIO, exc_info: ExcInfo) -> None:
    """Write a traceback below a log line, for structlog's renderer."""
    stream.write("\n" + render(exc_info))


def _shorten(shown: traceback.TracebackException) -> None:
    """Cut off the oldest exceptions of a chain, which grows with each retry that raises from the last error."""
    at: traceback.TracebackException | None = shown
    for _ in range(CHAINED - 1):
        if at is None:
            return
        at = at.__cause__ or at.__context__
    if at is not None:
        at.__cause__ = at.__context__ = None
