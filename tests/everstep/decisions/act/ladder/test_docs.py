"""docs/concepts/ladder.md shows the ladder as it is; this file, run as a program, prints it."""

from __future__ import annotations

from pathlib import Path

from everstep.decisions.act.ladder.describe import diagram, table
from everstep.decisions.act.ladder.next import DEFAULT_MODES

PAGE = Path(__file__).resolve().parents[5] / "docs" / "concepts" / "ladder.md"


def test_the_page_has_the_table_and_the_diagram_of_the_policy() -> None:
    page = PAGE.read_text()
    assert table() in page
    assert f"```mermaid\n{diagram()}\n```" in page


def test_the_page_names_each_rung_that_can_be_held_back_with_its_mode() -> None:
    page = PAGE.read_text()
    assert all(f"| `{rung}` | {mode} |" in page for rung, mode in DEFAULT_MODES.items())


if __name__ == "__main__":
    print(table(), diagram(), sep="\n\n")
