"""Files of /proc that several inspections read."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def meminfo(proc: Path) -> dict[str, int]:
    """``/proc/meminfo`` in bytes.

    Raises:
        OSError: it cannot be read.
    """
    rows = (line.split() for line in (proc / "meminfo").read_text().splitlines())
    return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if len(row) > 2}


def pressure(proc: Path, what: str) -> dict[str, float]:
    """How long processes had to wait for a resource, in per cent of the time, e.g. ``some avg60``.

    Args:
        proc: Where /proc is.
        what: ``cpu``, ``memory`` or ``io``.

    Returns:
        Nothing where the kernel does not say.
    """
    found: dict[str, float] = {}
    with suppress(OSError, ValueError):
        for line in (proc / "pressure" / what).read_text().splitlines():
            kind, *fields = line.split()
            found |= {f"{kind} {name}": float(value) for name, _, value in (field.partition("=") for field in fields)}
    return found
