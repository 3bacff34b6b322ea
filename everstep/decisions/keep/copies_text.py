"""Writes the texts that describe the copies of training state from which ranks are restored."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from everstep.base.text import listed
from everstep.model.state_copy import StateCopies, Tier

SOURCES = {
    Tier.OWN: "own memory on {}",
    Tier.BACKUP: "backups on {}",
    Tier.DISK: "disk of {}",
    Tier.REMOTE: "remote storage",
}


def copies_text(copies: Iterable[StateCopies]) -> str:
    """Return the sources of copies as text, e.g. ``ranks 4, 5 from backups on m1; rank 6 from disk of m3``."""
    ranks: dict[str, list[int]] = defaultdict(list)
    for entry in copies:
        source = SOURCES.get(entry.tier, f"{entry.tier} of {{}}")
        for machine, spans in entry.places.each():
            ranks[source.format(machine)] += (rank for first, last in spans for rank in range(first, last + 1))
    parts = [f"{'rank' if len(own) == 1 else 'ranks'} {listed(own)} from {source}" for source, own in ranks.items()]
    return "; ".join(parts[:4]) + (f"; and from {len(parts) - 4} more" if len(parts) > 4 else "")


def wanted_text(copies: Sequence[StateCopies], unverified: Sequence[StateCopies]) -> str:
    """Return the plan of a restore as text: ``rank 4 from backups on m1; verify 7 own slots``."""
    count = sum(len(entry.ranks) for entry in unverified)
    verify = [f"verify {count} own {'slot' if count == 1 else 'slots'}"] if count else []
    return "; ".join([*([copies_text(copies)] if copies else []), *verify])
