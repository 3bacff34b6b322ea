"""Runs a training script as ``__main__`` and logs its steps, for jobs that do not run under everstep.

    torchrun … benchmarks/peers/step_log.py FOLDER SCRIPT ARGS…

Each rank appends lines to ``FOLDER/<rank>-<attempt>``. A line has an event (``started``, ``imported`` or ``step``) and
its time by the wall clock, nanoseconds. The faults of the plan in EVERSTEP_FAULTS strike at the same point as under
everstep, between backward and the optimizer's step.
"""

from __future__ import annotations

import os
import runpy
import sys
import time
from pathlib import Path


def main() -> None:
    """Add hooks to the optimizer, and run the script."""
    started_ns = time.time_ns()
    folder, script, *args = sys.argv[1:]
    rank = int(os.environ["RANK"])
    log = StepLog(Path(folder), rank, int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")))
    log.event("started", started_ns)
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    from everstep.rank.drill_faults import RankFaults

    log.event("imported", time.time_ns())
    faults = RankFaults.from_environment(rank)
    steps = 0

    def before(*_: object) -> None:
        if faults is not None:
            faults.meet("step", steps)

    def after(*_: object) -> None:
        nonlocal steps
        steps += 1
        log.event("step", time.time_ns())

    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)
    sys.argv[:] = [script, *args]
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")


class StepLog:
    """The log of one rank in one attempt."""

    def __init__(self, folder: Path, rank: int, attempt: int) -> None:
        self._file = (folder / f"{rank}-{attempt}").open("ab", buffering=0)

    def event(self, name: str, time_ns: int) -> None:
        """Append one event."""
        self._file.write(f"{name} {time_ns}\n".encode())


def first(folder: Path, rank: int, attempt: int, event: str) -> int:
    """Return the time of a rank's first event of this kind in an attempt, nanoseconds; 0: there is none yet."""
    return next(iter(times(folder, rank, attempt, event)), 0)


def times(folder: Path, rank: int, attempt: int, event: str) -> list[int]:
    """Return the times of a rank's events of this kind in an attempt, nanoseconds."""
    try:
        lines = (folder / f"{rank}-{attempt}").read_text().splitlines()
    except FileNotFoundError:
        return []
    return [int(line.split()[1]) for line in lines if line.startswith(f"{event} ")]


if __name__ == "__main__":
    main()
