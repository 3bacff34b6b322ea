"""How long until a fault is found, by drill, with the default periods: kernel log, GPU, link, ranks, machines.

Each fault is injected several times into a small job on a local cluster, at steps of a seed's choice, so that it meets
the inspections at any moment of their periods. *Found* is when the machine's inspection says so, *told* when the
incident is open: for a machine that is faulty while its ranks go on that is a second later, for they might end with it.
Beside them what ByteRobust's table 3 says of its inspections. Its time without them is that of the framework's
time-out, about ten minutes.

    python -P benchmarks/detection.py
    python -P benchmarks/detection.py --quick --json
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections import defaultdict
from typing import Any

from benchmarks.common import Row, Spread, finish, say, show, show_json
from drills import Drill, DrillCluster, DrillRequest, DrillResult
from drills.checks import check
from drills.runner import References
from everstep.errors import CannotInject, EverstepError

SIZES: dict[str, Any] = {"machines": 2, "ranks_per_machine": 2, "tp": 2, "pp": 1}
STEPS = 60
FAULTS: dict[str, tuple[dict[str, Any], float, str]] = {
    "xid": ({"machine": "m1"}, 2.0, "kernel fault"),
    "gpu-lost": ({"machine": "m1"}, 10.0, "GPU lost"),
    "gpu-hot": ({"machine": "m1"}, 10.0, "temperature"),
    "fs-readonly": ({"machine": "m1"}, 2.0, "file system read-only"),
    "kill-rank": ({"ranks": [3]}, 0.05, "rank exit"),
    "kill-machine": ({"machine": "m1"}, 3.0, "machine gone"),
}
"""Fault → its options, the aim in seconds, and its name in the table: of inspections table 3's, the rest ours."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10, help="of each fault (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="2 runs")
    parser.add_argument("--seed", type=int, default=1, help="of steps (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    results, failures = asyncio.run(measure(2 if options.quick else options.runs, options.seed))
    rows = [row for fault in FAULTS for row in rows_of_fault(fault, results[fault])]
    if options.json:
        runs = {fault: [result.model_dump() for result in found] for fault, found in results.items()}
        show_json("detection", rows, runs=runs, failures=failures)
    else:
        show("detection", rows, ["The aims hold the time until it is found; of ranks and machines, until it is told."])
    finish(failures)


async def measure(runs: int, seed: int) -> tuple[dict[str, list[DrillResult]], list[str]]:
    """Inject each fault so often, in turns; returns what came of it, and what could not be injected or went wrong."""
    results: dict[str, list[DrillResult]] = defaultdict(list)
    failures: list[str] = []
    chosen = random.Random(seed)
    async with DrillCluster(machines=SIZES["machines"], standbys=0, workers=2) as cluster:
        references = References()
        for run in range(runs):
            for fault, (fault_options, _, _) in FAULTS.items():
                at_step = chosen.randrange(8, 24)
                request = DrillRequest(fault=fault, at_step=at_step, steps=STEPS, **SIZES, **fault_options)
                try:
                    check(request)
                    result = await Drill(cluster, request, references).run()
                except CannotInject as error:
                    failures.append(str(error))
                    continue
                except EverstepError as error:
                    failures.append(f"{fault}: {error}")
                    continue
                failures += [f"{fault}: {problem}" for problem in result.problems]
                results[fault].append(result)
                say(f"run {run + 1} of {runs}: {fault}: found {_s(result.found_s)}, told {_s(result.detected_s)}")
    await asyncio.sleep(0.1)  # the SDK's threads may still be ending
    return results, failures


def rows_of_fault(fault: str, results: list[DrillResult]) -> list[Row]:
    """Median and maximum of the time until it is found, where an inspection finds it, and until it is told."""
    _, aim, name = FAULTS[fault]
    rows = []
    for label, key in (("found", "found_s"), ("told", "detected_s")):
        times = [seconds for result in results if (seconds := getattr(result, key)) is not None]
        if not times:
            continue
        spread = Spread.of(times)
        bound = aim if label == "found" or all(result.found_s is None for result in results) else None
        rows += [
            Row(f"{name} ({fault}), {label}, median", "s", spread.median),
            Row(f"{name} ({fault}), {label}, maximum", "s", spread.maximum, aim=bound, aim_of="ours"),
        ]
    return rows


def _s(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.3f} s"


if __name__ == "__main__":
    main()
