"""How much time each kind of thing took, where the things overlap: each moment counts once, for the gravest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

K = TypeVar("K", bound=str)


def time_by_kind(
    spans: Iterable[tuple[int, int | None, K]], kinds: Sequence[K], *, begin_ns: int, end_ns: int
) -> dict[K, int]:
    """Nanoseconds of each kind; together they are all of the time.

    Args:
        spans: Begin, end (None: still going on) and kind, in any order; they may reach beyond the time.
        kinds: From the least to the gravest; the first one is what nothing covers.
        begin_ns: Of the time.
        end_ns: Of the time, not before its begin.
    """
    spent = dict.fromkeys(kinds, 0)
    changes: list[tuple[int, int, K]] = []
    for start_ns, stop_ns, kind in spans:
        first = max(start_ns, begin_ns)
        last = end_ns if stop_ns is None else min(stop_ns, end_ns)
        if first < last:
            changes += [(first, 1, kind), (last, -1, kind)]
    open_now = dict.fromkeys(kinds, 0)
    at = begin_ns
    for time_ns, change, kind in [*sorted(changes), (end_ns, 0, kinds[0])]:
        gravest = next((kind for kind in reversed(kinds) if open_now[kind]), kinds[0])
        spent[gravest] += time_ns - at
        open_now[kind] += change
        at = time_ns
    return spent
