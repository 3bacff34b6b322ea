"""Every row of ByteRobust's table 3 and every symptom of its table 1 has a drill.

For a row without a drill, docs/concepts/coverage.md gives the reason.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.monitor.all import INSPECTIONS
from drills.faults.all import FAULTS

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docs" / "concepts" / "coverage.md").read_text()
ITEMS = ("NIC crash", "port flap", "switch down", "driver hang", "GPU lost", "high temperature", "kernel fault")
SYMPTOMS = (
    *("CUDA error", "CPU overload", "CPU OOM", "insufficient disk space", "InfiniBand error", "file-system mount"),
    *("HDFS error", "container error", "OS kernel panic", "GPU memory error", "external service error"),
    *("GPU unavailable", "disk fault", "job hang", "MFU decline", "NaN value", "code or data adjustment"),
)
"""The names of the paper, in its order."""


def rows(head: str) -> Iterator[list[str]]:
    """Yield the rows of the table with this head."""
    for line in TEXT.partition(head)[2].splitlines()[2:]:
        if not line.startswith("|"):
            return
        yield [cell.strip() for cell in line.strip("|").split("|")]


TABLE_3, TABLE_1 = list(rows("| item | inspection |")), list(rows("| symptom | seen by |"))


def test_each_row_of_the_paper_is_there() -> None:
    assert tuple(row[0] for row in TABLE_3) == ITEMS
    assert tuple(row[0] for row in TABLE_1) == SYMPTOMS


@pytest.mark.parametrize("row", [*TABLE_3, *TABLE_1], ids=lambda row: row[0])
def test_it_has_a_drill_or_says_why_not(row: list[str]) -> None:
    said = row[-1]
    drills = {fault.name for fault in FAULTS}
    named = [name for name in re.findall(r"`([a-z-]+)`", said) if not name.startswith("--") and name in drills]
    why_not = re.search(r"\bnone, since .+", said)
    assert named or why_not
    for path in re.findall(r"`(tests/[\w/]+)`", said):
        assert (ROOT / path).exists()


@pytest.mark.parametrize("row", [*TABLE_3, *TABLE_1], ids=lambda row: row[0])
def test_the_inspections_that_it_names_are_there(row: list[str]) -> None:
    known = {kind.name for kind in INSPECTIONS} | {"remote-storage", "container-start", "stop", "evict"}
    named = set(re.findall(r"`([a-z-]+)`", row[1]))
    assert named <= known, "these are no inspections, and no known reason codes or commands"
