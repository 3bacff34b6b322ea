"""Which distributions an interpreter has: they are noted with a version, so that it can be made again elsewhere."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import structlog

LIMIT_S = 10.0
"""An interpreter that has not listed them after this long is left (ours)."""
MOST = 2000
"""Distributions that are noted (ours)."""
_PROGRAM = """
import importlib.metadata as metadata, itertools, json
found = {}
for one in metadata.distributions():
    try:
        name, version = one.metadata["Name"], one.version
    except Exception:
        continue
    if name and version:
        found.setdefault(str(name)[:100], str(version)[:60])
print(json.dumps(dict(itertools.islice(sorted(found.items(), key=lambda item: item[0].lower()), %d))))
"""

log = structlog.get_logger("versions")


def packages_of(python: str) -> dict[str, str]:
    """Distribution → version of an interpreter; none where it cannot say, which keeps nobody from running.

    Args:
        python: Path or name of it; empty: our own.
    """
    program = shutil.which(python) if python else sys.executable
    try:
        if not program:
            raise FileNotFoundError(f"there is no {python} here")
        # -I: what is in the folder we are in, or in our variables, is not the job's.
        ended = subprocess.run(
            [program, "-I", "-c", _PROGRAM % MOST],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=LIMIT_S,
            check=True,
        )
        return {str(name): str(version) for name, version in json.loads(ended.stdout).items()}
    except (OSError, ValueError, AttributeError, subprocess.SubprocessError) as error:
        log.warning("the packages of an interpreter are not known", python=python or program, reason=str(error)[:200])
        return {}
