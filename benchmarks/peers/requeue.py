"""Measures a requeue under torchrun: a job is ended and started again, without any queue or container."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.peers import step_log
from benchmarks.peers.torchrun import all_of, end_tree, start_peer, wait_for

STEPS = 5
"""Number of steps before the job is ended."""


def requeue(folder: Path, script: Path, args: Sequence[str], *, ranks: int) -> float:
    """End a job that steps, and start it again.

    Returns:
        Seconds from the last step of any rank until all ranks have completed a step again.

    Raises:
        PeerFailed: one of the two jobs did not step.
    """
    first, second = folder / "first", folder / "second"
    for own in (first, second):
        own.mkdir(parents=True)
    process = start_peer(_command(first, script, args, ranks), first, {})
    try:
        wait_for(lambda: _steps(first, ranks), lambda: process.poll() is None, "the first steps", first)
    finally:
        end_tree(process)
    stopped_ns = max(max(step_log.times(first, rank, 0, "step"), default=0) for rank in range(ranks))
    process = start_peer(_command(second, script, args, ranks), second, {})
    try:
        stepped_ns = wait_for(
            lambda: all_of(second, range(ranks), "step", 0), lambda: process.poll() is None, "a step", second
        )
    finally:
        end_tree(process)
    return (stepped_ns - stopped_ns) / 1e9


def _steps(folder: Path, ranks: int) -> int:
    """Return the number of steps of the slowest rank; 0: it has made fewer than ``STEPS``."""
    done = min(len(step_log.times(folder, rank, 0, "step")) for rank in range(ranks))
    return done if done >= STEPS else 0


def _command(folder: Path, script: Path, args: Sequence[str], ranks: int) -> list[str]:
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    log = str(Path(step_log.__file__).resolve())
    return [torchrun, "--nproc-per-node", str(ranks), "--standalone", log, str(folder), str(script), *args]
