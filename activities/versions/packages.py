"""Lists the distributions of an interpreter. The list is kept with a version, so that the version's environment can be
rebuilt elsewhere."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import subprocess
import sys
from collections.abc import Iterable
from functools import lru_cache
from itertools import islice
from pathlib import Path

import structlog

LIMIT_S = 10.0
"""The time in which an interpreter must list its distributions, seconds."""
MOST = 2000
"""The largest number of distributions that are kept."""
_PROGRAM = """
import importlib.metadata, json
found = {}
for one in importlib.metadata.distributions():
    try:
        found.setdefault(one.metadata["Name"], one.version)
    except Exception:
        pass
print(json.dumps([[name, version] for name, version in found.items()]))
"""

log = structlog.get_logger("versions")


def packages_of(python: str) -> dict[str, str]:
    """Return an interpreter's distributions with versions. An error is only logged, and the result is empty.

    Args:
        python: The path or name of the interpreter; empty: this process's own.
    """
    if not python:
        return dict(_own(tuple(map(_changed, sys.path))))
    try:
        program = shutil.which(python)
        if not program:
            raise FileNotFoundError(f"there is no {python} here")
        # -I: ignore modules in the current folder, and the PYTHON* variables of this process.
        ended = subprocess.run(
            [program, "-I", "-c", _PROGRAM],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=LIMIT_S,
            check=True,
        )
        return _bounded(dict(json.loads(ended.stdout)).items())
    except (OSError, ValueError, TypeError, subprocess.SubprocessError) as error:
        log.warning("the packages of an interpreter cannot be listed", python=python, reason=str(error)[:200])
        return {}


@lru_cache(maxsize=1)
def _own(_changed_at: tuple[float, ...]) -> dict[str, str]:
    """Return this process's distributions; they are listed again after an installation or a removal."""
    return _bounded((one.name, one.version) for one in importlib.metadata.distributions())


def _changed(folder: str) -> float:
    """Return when entries of a folder of modules were last added or removed."""
    try:
        return Path(folder).stat().st_mtime
    except OSError:
        return 0.0


def _bounded(found: Iterable[tuple[object, object]]) -> dict[str, str]:
    first: dict[str, str] = {}
    for name, version in found:  # if several have the same name, Python imports the first
        if name and version:
            first.setdefault(str(name)[:100], str(version)[:60])
    return dict(islice(sorted(first.items(), key=lambda item: item[0].lower()), MOST))
