"""The metrics that docs/reference/metrics.md names."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs" / "reference" / "metrics.md"


def labels_in_table(heading: str) -> dict[str, set[str]]:
    """Metric → its labels, as the first two columns of the table below a heading have them."""
    _, _, below = DOCS.read_text().partition(f"## {heading}\n")
    section = below.partition("\n## ")[0]
    rows = [line.split("|") for line in section.splitlines() if line.startswith("| `")]
    found = {
        name: set(re.findall(r"\w+", row[2])) if len(row) > 4 else set()
        for row in rows
        for name in re.findall(r"`([A-Za-z_0-9]+)", row[1])
    }
    assert found, f"docs/reference/metrics.md has no table below {heading!r}"
    return found


def names_in_table(heading: str) -> set[str]:
    """The metrics in the table below a heading."""
    return set(labels_in_table(heading))
