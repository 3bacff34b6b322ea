"""The topology of a job as text, with what each rank does."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from everstep.base.text import listed
from everstep.decisions.blame.hang.verdict import StackGroup
from everstep.model.topology import Topology

MOST_REPLICAS = 12
"""Columns that are drawn."""
MOST_GROUPS = 8
"""Groups of stacks that have a letter of their own."""
MOST_STAGES = 32
"""Rows that are drawn."""
UNKNOWN, REST = "?", "+"


def picture(
    topology: Topology,
    stacks: Sequence[StackGroup],
    *,
    named: Collection[int] = (),
    evicted: Collection[int] = (),
) -> str:
    """One row for each pipeline stage, one column for each replica of the data, one letter for each rank.

    Replicas in which nothing differs are left out where there are many.

    Args:
        topology: Of the job.
        stacks: Who does what; the first have the letters A, B, C …
        named: Ranks in brackets.
        evicted: Machines whose ranks are in parentheses.
    """
    letters = {rank: _letter(number) for number, group in enumerate(stacks) for rank in group.ranks}
    gone, marked = set(evicted), set(named)
    cells: dict[tuple[int, int], str] = {}
    for rank in range(topology.world_size):
        place = topology.coordinate(rank)
        key = (place.pp, place.dp)
        cells[key] = cells.get(key, "") + _shown(
            letters.get(rank, UNKNOWN), rank in marked, rank // topology.ranks_per_machine in gone
        )
    columns = _columns(cells, topology)
    head = [f"dp {column}" for column in columns]
    widths = [
        max(len(title), *(len(cells[row, column]) for row in range(topology.pp)))
        for title, column in zip(head, columns, strict=True)
    ]
    rows = [("", head)] + [
        (f"stage {row}", [cells[row, column] for column in columns]) for row in range(min(topology.pp, MOST_STAGES))
    ]
    lines = [
        f"{title:9}" + "  ".join(f"{text:{width}}" for text, width in zip(texts, widths, strict=True)).rstrip()
        for title, texts in rows
    ]
    if left := topology.dp - len(columns):
        lines.append(f"{'':9}and {left} more, in which no rank is marked")
    if left := topology.pp - MOST_STAGES:
        lines += [f"{'':9}and {left} more stages"] if left > 0 else []
    return "\n".join([*lines, *_legend(stacks, letters, topology, bool(marked), bool(gone))])


def _letter(number: int) -> str:
    return chr(ord("A") + number) if number < MOST_GROUPS else REST


def _shown(letter: str, named: bool, gone: bool) -> str:
    if named:
        return f"[{letter}]"
    return f"({letter})" if gone else f" {letter} "


def _columns(cells: dict[tuple[int, int], str], topology: Topology) -> list[int]:
    """All replicas where they are few; else those with marks, then those that differ from most, and one that does
    not."""
    if topology.dp <= MOST_REPLICAS:
        return list(range(topology.dp))
    whole = ["".join(cells[row, column] for row in range(topology.pp)) for column in range(topology.dp)]
    usual = max(set(whole), key=whole.count)
    rank = {
        column: (0 if set(text) & set("[(") else 2 if text == usual else 1, column) for column, text in enumerate(whole)
    }
    chosen = sorted(rank, key=lambda column: rank[column])[: MOST_REPLICAS - 1]
    return sorted({*chosen, whole.index(usual)})


def _legend(
    stacks: Sequence[StackGroup], letters: dict[int, str], topology: Topology, marked: bool, gone: bool
) -> list[str]:
    lines = []
    for number, group in enumerate(stacks[:MOST_GROUPS]):
        what = (
            f"{len(group.ranks)} rank{'' if len(group.ranks) == 1 else 's'}{' (most of their peers)' * group.dominant}"
        )
        lines.append(f"  {_letter(number)}  {what}: {group.text}")
    if len(stacks) > MOST_GROUPS:
        rest = sum(len(group.ranks) for group in stacks[MOST_GROUPS:])
        lines.append(f"  {REST}  {rest} ranks in {len(stacks) - MOST_GROUPS} more groups of stacks")
    if silent := [rank for rank in range(topology.world_size) if rank not in letters]:
        lines.append(f"  {UNKNOWN}  {len(silent)} without a stack: rank{'s' * (len(silent) > 1)} {listed(silent)}")
    if marked:
        lines.append("  [ ]  named")
    if gone:
        lines.append("  ( )  on a machine to be evicted")
    return lines
