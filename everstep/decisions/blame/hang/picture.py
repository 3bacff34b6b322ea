"""A picture of a job as text: its topology, and what each rank does."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from everstep.base.text import listed
from everstep.decisions.blame.hang.verdict import StackGroup
from everstep.model.topology import Topology

MOST_REPLICAS = 12
"""Largest number of columns."""
MOST_GROUPS = 8
"""Largest number of groups of stacks that get their own letter."""
MOST_STAGES = 32
"""Largest number of rows."""
UNKNOWN, REST = "?", "+"


def picture(
    topology: Topology,
    stacks: Sequence[StackGroup],
    *,
    named: Collection[int] = (),
    evicted: Collection[int] = (),
) -> str:
    """Draw a row for each pipeline stage, a column for each data parallel replica, and a letter for each rank.

    If there are many replicas, those without a difference are left out.

    Args:
        topology: The topology of the job.
        stacks: The groups of ranks with the same activity; they get the letters A, B, C …
        named: The ranks that are drawn in brackets.
        evicted: The machines whose ranks are drawn in parentheses.
    """
    letters = {rank: _letter(number) for number, group in enumerate(stacks) for rank in group.ranks}
    gone, marked = set(evicted), set(named)
    cells: dict[tuple[int, int], str] = {}
    for rank in range(topology.world_size):
        coordinate = topology.coordinate(rank)
        key = (coordinate.pp, coordinate.dp)
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
    """Return the replicas to draw: all if they are few; otherwise those with marks, then those that differ, and a usual
    one."""
    if topology.dp <= MOST_REPLICAS:
        return list(range(topology.dp))
    texts = ["".join(cells[row, column] for row in range(topology.pp)) for column in range(topology.dp)]
    usual = max(set(texts), key=texts.count)
    rank = {
        column: (0 if set(text) & set("[(") else 2 if text == usual else 1, column) for column, text in enumerate(texts)
    }
    chosen = sorted(rank, key=lambda column: rank[column])[: MOST_REPLICAS - 1]
    return sorted({*chosen, texts.index(usual)})


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
