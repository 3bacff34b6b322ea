"""Bitwise alignment: which machines of one kind computed other bits than the others (ByteRobust, section 4.2).

Every machine does the same calculation; the digests of what came out are compared. The majority is right: more than
half of the machines of a kind have to agree, or nobody is named. Two that differ do just that: neither is named.
What machines of different kinds compute is not compared.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

NAMED = 3
"""Results that differ and are named of one machine."""


@dataclass(frozen=True, slots=True)
class BitsCompared:
    """What a comparison says of one machine."""

    agrees: bool | None
    """False: it computed other bits than most. None: that cannot be told."""
    text: str = ""
    """Why not, or what differs."""
    differing: tuple[str, ...] = field(default=())
    """Names of the results that differ from most."""


@dataclass(frozen=True, slots=True)
class Computed:
    """What one machine computed."""

    kind: str
    """Machines of other kinds may rightly compute other bits."""
    digests: Mapping[str, str]
    """Name of each result → digest."""


def compare(computed: Mapping[str, Computed]) -> dict[str, BitsCompared]:
    """What the results of all machines say of each."""
    kinds: dict[str, dict[str, Computed]] = defaultdict(dict)
    for machine, one in computed.items():
        kinds[one.kind][machine] = one
    return {machine: said for group in kinds.values() for machine, said in _of_kind(group).items()}


def _of_kind(group: Mapping[str, Computed]) -> dict[str, BitsCompared]:
    if len(group) == 1:
        return dict.fromkeys(group, BitsCompared(None, "there is no other machine of its kind to compare it with"))
    counts = Counter(_bits(one) for one in group.values())
    bits, count = counts.most_common(1)[0]
    if count * 2 <= len(group):
        text = "the two machines of this kind differ" if len(group) == 2 else "no majority of the machines agrees"
        return dict.fromkeys(group, BitsCompared(None, f"{text}: nobody can be named"))
    usual, found = dict(bits), {}
    for machine, one in group.items():
        odd = tuple(sorted(name for name in usual.keys() | one.digests if usual.get(name) != one.digests.get(name)))
        more = f" and {len(odd) - NAMED} more" if len(odd) > NAMED else ""
        text = f"other bits than {count} of {len(group)} machines of its kind: {', '.join(odd[:NAMED])}{more}"
        found[machine] = BitsCompared(False, text, odd) if odd else BitsCompared(True)
    return found


def _bits(one: Computed) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(one.digests.items()))
