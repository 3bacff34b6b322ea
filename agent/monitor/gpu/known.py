"""What is known of one GPU from earlier looks: counters, how often in a row something was so, links that were up."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any


class GpuKnown:
    """Of one GPU; read and written as JSON.

    Args:
        kept: As ``kept`` gave it, of an earlier look or an earlier agent; empty: nothing is known.
    """

    def __init__(self, kept: Mapping[str, Any]) -> None:
        self._counters: dict[str, int] = dict(kept.get("counters", {}))
        self._rows: dict[str, int] = dict(kept.get("rows", {}))
        self._links: set[int] = set(kept.get("links", []))
        self.seen_ns: int = kept.get("seen_ns", 0)
        """When the counters were read last, by the machine's clock; 0: never."""

    def kept(self) -> dict[str, Any]:
        """All of it."""
        return {
            "counters": self._counters,
            "rows": {what: count for what, count in self._rows.items() if count},
            "links": sorted(self._links),
            "seen_ns": self.seen_ns,
        }

    def rose(self, counter: str, value: int | None) -> int | None:
        """By how much a counter rose since the last look, which is then its baseline.

        Returns:
            None where nothing can be concluded: it is read for the first time, cannot be read, or went back, as after a
            reset or where it wrapped.
        """
        if value is None:
            return None
        before = self._counters.get(counter)
        self._counters[counter] = value
        return None if before is None or value < before else value - before

    def went_back(self, counter: str, value: int | None) -> bool:
        """Whether a counter is less than at the last look. Ask before ``rose``."""
        return value is not None and value < self._counters.get(counter, 0)

    def in_a_row(self, what: str, so: bool | None) -> int:
        """How many looks saw something one after the other, this one too; None: this one does not say."""
        if so is not None:
            self._rows[what] = self._rows.get(what, 0) + 1 if so else 0
        return self._rows.get(what, 0)

    def links_up(self, up: Collection[int]) -> set[int]:
        """The NVLinks that were up in this look or an earlier one."""
        self._links |= set(up)
        return self._links
