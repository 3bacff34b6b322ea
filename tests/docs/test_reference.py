"""The pages of docs/reference repeat what the tables in the code contain."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs.generate.pages import FOLDER, PAGES, text_of_all

DOCS = FOLDER.parent


@pytest.mark.timeout(600)  # hundreds of cases are played
def test_every_page_is_as_it_is_made_from_the_code() -> None:
    stale = [name for name, text in text_of_all().items() if (FOLDER / name).read_text() != text]
    assert stale == [], "these pages are stale, so run `make docs`"


def test_there_is_no_other_page() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {*PAGES, "README.md"}


@pytest.mark.parametrize("shelf", ["start", "guides", "concepts", "reference"])
def test_no_page_is_long(shelf: str) -> None:
    long = {path: count for path in (DOCS / shelf).glob("*.md") if (count := len(_lines(path))) > 200}
    assert long == {}


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines()
