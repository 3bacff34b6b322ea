"""Every link between pages has a target, and every page can be reached from the index."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
LINK = re.compile(r"\]\(([^)\s]+)\)")
LAYERS = "everstep|agent|activities|workflows|controlplane|drills|console|tests|benchmarks|deploy|examples|proto"
FILE = re.compile(rf"(?<![\w/.(])(?:{LAYERS})/[\w/*@-]+(?:\.\w+)?")
"""Matches the path of a file or folder of the repository."""
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def pages() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [path for name in listed.stdout.splitlines() if (path := ROOT / name).exists()]


def links(page: Path) -> list[tuple[Path, str]]:
    """Return the file and the heading of each link to a page of this repository."""
    targets = [target for target in LINK.findall(FENCE.sub("", page.read_text())) if "://" not in target]
    parts = [target.partition("#") for target in targets]
    return [((page.parent / path).resolve() if path else page, heading) for path, _, heading in parts]


def headings(page: Path) -> set[str]:
    """Return the anchors that GitHub makes from a page's headings."""
    titles = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    for target, heading in links(page):
        assert target.exists(), f"there is no {target}"
        assert not heading or heading in headings(target), f"{target.name} has no heading #{heading}"


def test_every_page_is_reached_from_the_index() -> None:
    reached: set[Path] = set()
    waiting = [DOCS / "README.md"]
    while waiting:
        page = waiting.pop()
        if page not in reached and page.suffix == ".md":
            reached.add(page)
            waiting += [target for target, _ in links(page) if target.is_relative_to(DOCS)]

    assert [str(page) for page in pages() if page.is_relative_to(DOCS) and page not in reached] == []


def test_the_index_of_decisions_has_every_title() -> None:
    records = sorted((DOCS / "adr").glob("0*.md"))
    titles = [(record.name, record.read_text().split("\n", 1)[0].partition(": ")[2]) for record in records]
    index = (DOCS / "adr" / "README.md").read_text()
    assert [name for name, title in titles if f"({name}) | {title} |" not in index] == []


def test_every_file_that_a_page_names_exists() -> None:
    named = {(str(page.relative_to(ROOT)), name) for page in pages() for name in FILE.findall(page.read_text())}
    assert len(named) > 100
    assert [f"{page}: {name}" for page, name in sorted(named) if not list(ROOT.glob(name))] == []


def test_every_page_that_the_code_names_exists() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    code = [ROOT / name for name in listed.stdout.splitlines() if name.endswith((".py", ".toml", ".yml", ".service"))]
    named = {
        (str(path.relative_to(ROOT)), page)
        for path in code
        if path.exists()
        for page in re.findall(r"\bdocs/[\w/-]+\.md", path.read_text())
    }
    assert named
    assert [name for name in sorted(named) if not (ROOT / name[1]).exists()] == []


def test_the_table_of_folders_is_complete() -> None:
    rows = (DOCS / "architecture.md").read_text().partition("\n## The house")[2].splitlines()
    house = {
        row.split("`")[1]: re.findall(r"`(\w+)/`", row.partition(" | ")[2]) for row in rows if row.startswith("| `")
    }
    layers = [layer for layer in house if layer in {f"{name}/" for name in LAYERS.split("|")}]
    assert len(layers) == 7
    for layer in layers:
        folders = {path.name: path for path in (ROOT / layer).rglob("*") if path.is_dir() and list(path.glob("*.py"))}
        rooms = {name for name, path in folders.items() if path.parent == ROOT / layer}
        assert rooms <= set(house[layer]), layer
        assert set(house[layer]) <= folders.keys(), layer
