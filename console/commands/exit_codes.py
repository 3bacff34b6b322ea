"""How a command runs its coroutine: when no cluster answers, the exit code is 3."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine
from typing import Any, NoReturn

import typer

from controlplane.shown import clean
from everstep.errors import ClusterError

EXIT_NOTHING_UP = 3


def finish(work: Coroutine[Any, Any, int]) -> NoReturn:
    """Run a command's work and end with its exit code; 3 when no cluster or no Temporal answers."""
    try:
        code = asyncio.run(work)
    except ClusterError as error:
        print(f"error: {clean(str(error))}", file=sys.stderr)
        code = EXIT_NOTHING_UP
    raise typer.Exit(code)
