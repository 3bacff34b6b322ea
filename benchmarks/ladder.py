"""Measures the time of each rung of the ladder, and of the complete ladder for a machine that computes wrong gradients.

Jobs run on 4, 8 and 16 local machines with one rank each, and there is one spare machine. One machine computes a
gradient with a wrong bit, but only in jobs of several machines. So the machine's tests pass, a restart does not help,
and the replay finds the machine. In other jobs new code fails after a step and is rolled back. The time of a rung is
taken from the incident's report. The time of the complete ladder is that from the fault until all ranks step without
the machine. The peer is ByteRobust's table 6: 4,289 s on average until a NaN was located.

    python -P benchmarks/ladder.py
    python -P benchmarks/ladder.py --quick --json
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.common import Row, Spread, finish, say, show, show_json
from drills import Drill, DrillCluster, DrillResult, drill_request
from drills.runner import References
from everstep.errors import EverstepError
from everstep.model.ladder import Rung

SIZES = (4, 8, 16)
"""Numbers of machines of the job."""
AIM_MACHINES, AIM_S = 8, 60.0
"""The aim for the complete ladder: seconds with this many machines."""
PAPER_S = 4289.0
"""Average time until a NaN was located, seconds (ByteRobust, table 6)."""
PARTS: Mapping[str, dict[str, Any]] = {
    "bitflip": {"only_in_job": True, "at_step": 12, "steps": 40},
    "bad-version": {"fails_after": 1, "at_step": 12, "steps": 60},
}
"""Fault → its options. Together their incidents reach every rung."""
RUNGS: Mapping[str, tuple[Rung, ...]] = {
    "bitflip": (Rung.DIAGNOSE, Rung.REATTEMPT, Rung.REPLAY),
    "bad-version": (Rung.ROLLBACK,),
}
"""Fault → the rungs that its incident must reach."""
JOB: dict[str, Any] = {"ranks_per_machine": 1, "tp": 1, "pp": 1}

Results = dict[tuple[int, str], list[DrillResult]]
"""Machines and fault → the results, run by run."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--runs", type=int, default=3, help="number of runs of each fault and size (default: %(default)s)"
    )
    parser.add_argument(
        "--machines", type=int, nargs="+", default=list(SIZES), help="numbers of machines of the job (default: 4 8 16)"
    )
    parser.add_argument("--quick", action="store_true", help="make 1 run, with 4 and 8 machines")
    parser.add_argument(
        "--seed", type=int, default=1, help="seed of the random machine at fault (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    sizes, runs = ((4, 8), 1) if options.quick else (options.machines, options.runs)
    results, failures = asyncio.run(measure(sizes, runs, options.seed))
    rows = [row for machines in sizes for row in rows_of(machines, results)]
    if options.json:
        every = {f"{fault}, {machines} machines": found for (machines, fault), found in results.items()}
        dumped = {name: [result.model_dump() for result in found] for name, found in every.items()}
        show_json("ladder", rows, runs=dumped, failures=failures)
    elif rows:
        show("ladder", rows, [f"The peer is table 6 of ByteRobust: {PAPER_S:,.0f} s until a NaN was located, there."])
    finish(failures)


async def measure(sizes: Sequence[int], runs: int, seed: int) -> tuple[Results, list[str]]:
    """Inject each fault ``runs`` times with each number of machines; return the results and the failures."""
    results: Results = defaultdict(list)
    failures: list[str] = []
    chosen = random.Random(seed)
    for machines in sizes:
        async with DrillCluster(machines=machines + 1, standbys=0, workers=2) as cluster:
            references = References()
            for run in range(1, runs + 1):
                for fault, options in PARTS.items():
                    struck = {"machine": f"m{chosen.randrange(machines)}"} if fault == "bitflip" else {}
                    request = drill_request(fault=fault, machines=machines, **JOB, **options, **struck)
                    name = f"{fault}, {machines} machines"
                    try:
                        result = await Drill(cluster, request, references).run()
                    except EverstepError as error:
                        failures.append(f"{name}: {error}")
                        continue
                    failures += [f"{name}: {problem}" for problem in result.problems]
                    tried = {rung for rung, _ in result.tried}
                    failures += [f"{name}: it did not reach {rung}" for rung in RUNGS[fault] if rung not in tried]
                    results[machines, fault].append(result)
                    costs = ", ".join(f"{rung} {seconds:.1f} s" for rung, seconds in result.tried)
                    say(f"run {run} of {runs}: {name}: {costs}; all ranks step again after {result.recovered_s} s")
    await asyncio.sleep(0.1)  # the SDK's threads may still be ending
    return results, failures


def rows_of(machines: int, results: Mapping[tuple[int, str], Sequence[DrillResult]]) -> list[Row]:
    """Return rows with median and maximum of each rung, and of the complete ladder, for a number of machines."""
    rows = []
    for fault, rungs in RUNGS.items():
        found = results.get((machines, fault), [])
        for rung in rungs:
            costs = [seconds for result in found for name, seconds in result.tried if name == rung]
            rows += _spread(f"{machines} machines, {rung}", costs)
    complete = [seconds for result in results.get((machines, "bitflip"), []) if (seconds := result.recovered_s)]
    aim = AIM_S if machines == AIM_MACHINES else None
    return rows + _spread(f"{machines} machines, the complete ladder", complete, peer=PAPER_S, aim=aim)


def _spread(name: str, values: Sequence[float], *, peer: float | None = None, aim: float | None = None) -> list[Row]:
    if not values:
        return []
    spread = Spread.of(values)
    return [
        Row(f"{name}, median", "s", spread.median, peer, aim, "ours"),
        Row(f"{name}, maximum", "s", spread.maximum, peer, aim, "ours"),
    ]


if __name__ == "__main__":
    main()
