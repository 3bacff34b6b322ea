"""Measures what a checkpoint of every step costs, in four parts. In each part the peers handle the same number of
bytes.

saves: the time for which a save blocks training, compared with DLRover's flash checkpoint, torch's DCP and plain
copies; throughput: how much training slows down; exchange: how fast agents exchange slots, compared with a bare socket
and a plain copy; restore: the time in which a new rank restores its state, compared with torch.load, DCP and a plain
copy.

    python -P benchmarks/checkpoint.py
    python -P benchmarks/checkpoint.py --quick --parts saves,restore
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks import checkpoint_exchange, checkpoint_restore, checkpoint_saves, checkpoint_throughput
from benchmarks.checkpoint_rank import PARAMETERS, SIDES
from benchmarks.checkpoint_throughput import Case
from benchmarks.common import Row, finish, say, show, show_json

LARGE = 512
SIZES = (64, LARGE)
"""Sizes of a rank's state, MB."""
MANY = 667
"""Number of parameters of a model with many: 2,001 tensors are saved."""


@dataclass(frozen=True, slots=True)
class Part:
    """The result of one part."""

    rows: list[Row]
    notes: list[str]
    failures: list[str]
    """The sides that did not run, with the reasons."""
    runs: Any
    """All figures, for JSON."""


def saves(quick: bool) -> Part:
    """Measure the cost of a save for the training thread."""
    states = [(SIZES[0], PARAMETERS)] if quick else [(size, count) for size in SIZES for count in (PARAMETERS, MANY)]
    found = checkpoint_saves.measure(states, rounds=1 if quick else 3, steps=6 if quick else 10, sides=list(SIDES))
    return Part(
        [row for size in found for row in size.rows()],
        [size.table() for size in found],
        [failure for size in found for failure in size.failures],
        [asdict(size) for size in found],
    )


def throughput(quick: bool) -> Part:
    """Measure how much training slows down."""
    steps = 4
    cases = [
        Case(ranks, megabytes, backup)
        for megabytes in (SIZES[:1] if quick else SIZES)
        for ranks, backup in ((1, True), (1, False), (2, True))
    ]
    asyncio.run(checkpoint_throughput.measure(cases, blocks=3 if quick else 16, steps=steps))
    rows = [row for case in cases for row in case.rows()]
    failures = [case.note() for case in cases if case.failure]
    return Part(rows, [case.note() for case in cases], failures, [asdict(case) for case in cases])


def exchange(quick: bool) -> Part:
    """Measure the rate of transfers of slots between agents."""
    found = checkpoint_exchange.measure(LARGE, runs=3 if quick else 20)
    return Part(found.rows(), [found.table()], [], asdict(found))


def restore(quick: bool) -> Part:
    """Measure the time in which a new rank restores its state."""
    found = checkpoint_restore.measure(LARGE, runs=3 if quick else 12)
    return Part(found.rows(), [], found.failures, asdict(found))


PARTS: dict[str, Callable[[bool], Part]] = {
    "exchange": exchange,  # first: it forks, so there must be no threads yet
    "restore": restore,
    "saves": saves,
    "throughput": throughput,
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="make fewer and shorter runs, with 64 MB instead of 64 and 512 MB"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--parts", default=",".join(PARTS), help="parts to measure (default: %(default)s)")
    options = parser.parse_args()
    chosen = options.parts.split(",")
    if unknown := set(chosen) - PARTS.keys():
        parser.error(f"there is no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    # SIGTERM acts as Ctrl-C, so that this program ends all processes that it started before it exits.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    found = {}
    for name, measure in PARTS.items():
        if name in chosen:
            load = os.getloadavg()[0]
            say(f"{name} (load {load:.1f})")
            found[name] = measure(options.quick)
            found[name].notes.append(f"load at the beginning of {name}: {load:.1f}")
    rows = [row for part in found.values() for row in part.rows]
    failures = [failure for part in found.values() for failure in part.failures]
    if options.json:
        show_json("checkpoint", rows, runs={name: part.runs for name, part in found.items()}, failures=failures)
    else:
        show("checkpoint", rows, [note for part in found.values() for note in part.notes])
    finish(failures)


if __name__ == "__main__":
    main()
