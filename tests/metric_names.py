"""The metrics that docs/metrics.md names."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs" / "metrics.md"


def names_in_table(heading: str) -> set[str]:
    """Names in the first column of the table below a heading."""
    _, _, below = DOCS.read_text().partition(f"## {heading}\n")
    section = below.partition("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    found = {name for row in rows for name in re.findall(r"`([A-Za-z_0-9]+)", row)}
    assert found, f"docs/metrics.md has no table below {heading!r}"
    return found
