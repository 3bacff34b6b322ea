"""What the programs of nccl-tests print.

A row of their table has size, count, type, redop and root, and then, out of place and in place, time in microseconds,
algbw and busbw in GB/s, and the number of wrong values (``N/A`` where they were not compared).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

ALL_TO_ALL = "alltoall_perf"
_FIGURES = r"\s+(?P<time{0}>[\d.]+)\s+(?P<algbw{0}>[\d.]+)\s+(?P<busbw{0}>[\d.]+)\s+(?P<wrong{0}>\d+|N/A)"
ROW = re.compile(r"^\s*\d+\s+\d+\s+\w+\s+\w+\s+-?\d+" + _FIGURES.format(0) + _FIGURES.format(1) + r"\s*$")
OUT_OF_BOUNDS = re.compile(r"^# Out of bounds values\s*:\s*(\d+)")


@dataclass(frozen=True, slots=True)
class NcclRun:
    """What a run of one of the programs says."""

    bus_bytes_per_second: float
    """The best of all rows; comparable between numbers of GPUs."""
    wrong: int


def parsed(text: str) -> NcclRun | None:
    """What a program printed; None: no result is in it."""
    best, wrong, rows = 0.0, 0, 0
    for line in text.splitlines():
        if row := ROW.match(line):
            rows += 1
            best = max(best, float(row["busbw0"]), float(row["busbw1"]))
            wrong += sum(int(row[name]) for name in ("wrong0", "wrong1") if row[name] != "N/A")
        elif bounds := OUT_OF_BOUNDS.match(line):
            wrong = max(wrong, int(bounds[1]))
    return NcclRun(best * 1e9, wrong) if rows else None
