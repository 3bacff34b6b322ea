"""Shows the progress of long operations: a clock on a terminal, or a line every 10 s in a pipe."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = Callable[[str], None]
"""A function that shows one line about the current operation."""

LINE_INTERVAL_S = 10.0
CLOCK_INTERVAL_S = 0.2


@contextmanager
def waiting(progress: Progress, step: str, detail: Callable[[], str] = lambda: "") -> Iterator[None]:
    """Show the name of an operation, and its duration while it runs.

    Args:
        progress: Shows the lines.
        step: Name of the operation, e.g. ``"building the Temporal server"``.
        detail: Returns the progress of the operation, e.g. ``"812 packages"``.
    """
    progress(step)
    done = threading.Event()
    clock = threading.Thread(target=_tick, args=(progress, step, detail, done), daemon=True)
    clock.start()
    try:
        yield
    finally:
        done.set()
        clock.join()


def _tick(progress: Progress, step: str, detail: Callable[[], str], done: threading.Event) -> None:
    began = time.monotonic()
    terminal = sys.stderr.isatty()
    while not done.wait(CLOCK_INTERVAL_S if terminal else LINE_INTERVAL_S):
        so_far = f"{time.monotonic() - began:.0f} s" + (f", {found}" if (found := detail()) else "")
        if terminal:
            sys.stderr.write(f"\r\x1b[2K  … {step}: {so_far}")
            sys.stderr.flush()
        else:
            progress(f"still {step}: {so_far}")
    if terminal:
        sys.stderr.write("\r\x1b[2K")
        sys.stderr.flush()
