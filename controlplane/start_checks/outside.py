"""Code that a job imports from outside its version: from PYTHONPATH, or from an editable install.

If such code changes, no version records the change.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from importlib.metadata import Distribution, distributions
from itertools import islice
from pathlib import Path
from urllib.parse import unquote, urlsplit

from activities.versions.listing import files_of
from everstep.base.text import listed
from everstep.model.job import JobSpec

NAMED = 4
"""Number of folders that a warning names."""
READ_FILES, READ_BYTES = 500, 200_000
"""Number of files of a folder that are searched for imports, and bytes of each."""
OURS = "everstep"
"""Everstep itself is left out of the warning."""
_IMPORT = re.compile(rb"^[ \t]*(?:from[ \t]+(\w+)[\w.]*[ \t]+import\b|import[ \t]+([\w., \t]+))", re.MULTILINE)


def outside_code(spec: JobSpec, folder: Path) -> str:
    """A warning about code that a snapshot of the folder leaves out; empty: this machine sees no such code.

    Args:
        spec: The job before any snapshot; it is checked as it would run on this machine.
        folder: The folder of the snapshot.

    Raises:
        ConfigError: the folder cannot be read.
    """
    names = _imported(folder) - {OURS}
    inside = folder.resolve()
    places = [
        f"{place} ({how})"
        for place, how in [*_by_path(spec), *([] if spec.python else _editable())]
        if any(_holds(place, name) for name in names) and place.resolve() != inside
    ]
    if not places:
        return ""
    return (
        f"warning: code in {listed(places, NAMED)} is no part of its version: should it change, nobody can say what "
        "ran. Have it in the folder (--code DIR names another one), or install it as a package"
    )


def _by_path(spec: JobSpec) -> Iterator[tuple[Path, str]]:
    """Folders in the job's own PYTHONPATH."""
    for entry in spec.env.get("PYTHONPATH", "").split(os.pathsep):
        path = Path(entry)
        if entry and path.is_absolute() and not {"site-packages", "dist-packages"} & {*path.parts}:
            yield path, "PYTHONPATH"


def _editable() -> Iterator[tuple[Path, str]]:
    """Folders of distributions with an editable install."""
    for found in distributions():
        if (place := _linked_to(found)) and found.name != OURS:
            source = place / "src"
            yield (source if source.is_dir() else place), f"{found.name}, an editable install"


def _linked_to(found: Distribution) -> Path | None:
    try:
        told = json.loads(found.read_text("direct_url.json") or "{}")
        url = urlsplit(told["url"]) if told["dir_info"]["editable"] else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return Path(unquote(url.path)) if url and url.scheme == "file" else None


def _holds(place: Path, name: str) -> bool:
    return (place / f"{name}.py").is_file() or (place / name).is_dir()


def _imported(folder: Path) -> set[str]:
    """The modules and packages that a folder's files import and that are not in the folder."""
    names: set[str] = set()
    sources = (name for name in files_of(folder) if name.endswith(".py"))
    for source in islice(sources, READ_FILES):
        try:
            with (folder / source).open("rb") as file:
                text = file.read(READ_BYTES)
        except OSError:
            continue
        for one, several in _IMPORT.findall(text):
            words = (
                [one] if one else [part.split()[0].partition(b".")[0] for part in several.split(b",") if part.split()]
            )
            names |= {word.decode() for word in words}
    return {name for name in names if not _holds(folder, name)}
