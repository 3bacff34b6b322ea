"""Which distributions an interpreter has: they are noted with a version, so that it can be made again elsewhere."""

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
"""An interpreter that has not listed them after this long is left."""
MOST = 2000
"""Distributions that are noted."""
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
    """Distribution → version of an interpreter; none where it cannot say, which keeps nobody from running.

    Args:
        python: Path or name of it; empty: our own.
    """
    if not python:
        return dict(_own(tuple(map(_changed, sys.path))))
    try:
        program = shutil.which(python)
        if not program:
            raise FileNotFoundError(f"there is no {python} here")
        # -I: what is in the folder we are in, or in our variables, is not the job's.
        ended = subprocess.run(
            [program, "-I", "-c", _PROGRAM],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=LIMIT_S,
            check=True,
        )
        return _bounded(dict(json.loads(ended.stdout)).items())
    except (OSError, ValueError, TypeError, subprocess.SubprocessError) as error:
        log.warning("the packages of an interpreter are not known", python=python, reason=str(error)[:200])
        return {}


@lru_cache(maxsize=1)
def _own(_changed_at: tuple[float, ...]) -> dict[str, str]:
    """Ours: listed again once something was installed or removed."""
    return _bounded((one.name, one.version) for one in importlib.metadata.distributions())


def _changed(folder: str) -> float:
    """When entries came into a folder of modules, or left it."""
    try:
        return Path(folder).stat().st_mtime
    except OSError:
        return 0.0


def _bounded(found: Iterable[tuple[object, object]]) -> dict[str, str]:
    first: dict[str, str] = {}
    for name, version in found:  # the first one is the one that is imported
        if name and version:
            first.setdefault(str(name)[:100], str(version)[:60])
    return dict(islice(sorted(first.items(), key=lambda item: item[0].lower()), MOST))
