"""Reads the units of systemd that are shipped."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "deploy" / "systemd"
AGENT, WORKER = FOLDER / "everstep-agent.service", FOLDER / "everstep-worker@.service"


def settings(unit: Path) -> dict[str, list[str]]:
    """Return the values of each setting; a setting that is repeated has several."""
    found: dict[str, list[str]] = defaultdict(list)
    for line in unit.read_text().replace("\\\n", " ").splitlines():
        if not line.startswith(("#", "[")) and "=" in line:
            name, _, value = line.partition("=")
            found[name].append(value)
    return found
