"""The glossary's words: a word that is gone is not used again. That its files exist is checked in test_links."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "concepts" / "glossary.md"
LAYERS = ("everstep", "agent", "activities", "workflows", "controlplane", "drills", "console")


def gone() -> Iterator[tuple[str, str]]:
    """Yield each word of the second table, with the place from which it is gone."""
    rows = PAGE.read_text().partition("## Words gone")[2].splitlines()
    for row in filter(lambda row: row.startswith("| `"), rows):
        words, _, places = row.strip("|").split("|")
        for place in filter(None, (place.strip() for place in places.split(","))):
            yield from ((word, place) for word in re.findall(r"`([\w ]+)`", words))


@cache
def tracked(suffix: str) -> list[Path]:
    listed = subprocess.run(["git", "ls-files", f"*{suffix}"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [path for name in listed.stdout.splitlines() if (path := ROOT / name).exists()]


@cache
def names() -> dict[str, str]:
    """Return every name that the product defines, with a file that defines it."""
    found: dict[str, str] = {}
    for path in tracked(".py"):
        where = path.relative_to(ROOT)
        if where.parts[0] in LAYERS and where.parts[:2] != ("agent", "v1"):
            for node in ast.walk(ast.parse(path.read_text())):
                name = getattr(node, "name", None) or getattr(node, "arg", None) or _stored(node)
                if isinstance(name, str):
                    found[name] = str(where)
    return found


def _stored(node: ast.AST) -> str | None:
    if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
        return node.id if isinstance(node, ast.Name) else node.attr
    return None


@cache
def prose() -> dict[str, str]:
    """Return the pages that people wrote, without code and without the glossary's own table.

    The pages of docs/reference are left out, since they repeat texts of the code.
    """
    made = ROOT / "docs" / "reference"
    pages = [path for path in tracked(".md") if path.is_relative_to(ROOT / "docs") or path.parent == ROOT]
    pages = [page for page in pages if page.parent != made]
    texts = {str(page.relative_to(ROOT)): page.read_text() for page in pages}
    texts[str(PAGE.relative_to(ROOT))] = PAGE.read_text().partition("## Words gone")[0]
    return {
        page: re.sub(r"`[^`]*`", "", re.sub(r"```.*?```", "", text, flags=re.DOTALL)) for page, text in texts.items()
    }


@pytest.mark.parametrize(("word", "place"), list(gone()))
def test_a_word_that_is_gone_stays_away(word: str, place: str) -> None:
    assert place in ("names", "docs")
    if place == "names":
        assert {name: where for name, where in names().items() if f"_{word}_" in _parts(name)} == {}
    else:
        assert [page for page, text in prose().items() if re.search(rf"\b{word}\b", text, re.IGNORECASE)] == []


def _parts(name: str) -> str:
    """Return the words of a name in small letters, each between two underscores."""
    return f"_{'_'.join(re.findall(r'[A-Z]+(?![a-z])|[A-Z]?[a-z]+', name)).lower()}_"


def test_some_words_are_gone() -> None:
    assert len(list(gone())) >= 5
