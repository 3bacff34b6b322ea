"""Measures the time until faults of devices, ranks and machines are detected and reported, with default periods.

Each fault is injected several times as a drill into a small job on a local cluster, at random steps, so that it strikes
at any moment of an inspection's period. Faults of links, and machines that stay away, need clusters of their own. A
fault is *found* when an inspection detects it, or, for a rank that ends, when the agent detects the end. A fault is
*reported* when its incident is open. If a machine is faulty while its ranks step, the incident opens a second after the
finding, since the ranks might end too. If several machines have the same fault, the incident opens ten seconds after
the finding. Most aims are those of ByteRobust's table 3. Without inspections, ByteRobust needs the framework's time-out
of about ten minutes.

    python -P benchmarks/detection.py
    python -P benchmarks/detection.py --quick --json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from benchmarks.common import Row, Spread, finish, say, show, show_json
from drills import Drill, DrillCluster, DrillResult, drill_request
from drills.checks import check
from drills.runner import References
from everstep.errors import CannotInject, EverstepError

SIZES: dict[str, Any] = {"machines": 2, "ranks_per_machine": 2, "tp": 2, "pp": 1}
STEPS = 60
LIMIT_S = 1800.0
"""Time limit for all runs of a fault on a separate cluster, seconds."""
SMALL = ["--machines", "2", "--ranks-per-machine", "2", "--tp", "2", "--pp", "1"]
IN_A_NETWORK = ["--machines", "3", "--ranks-per-machine", "1", "--tp", "1", "--pp", "1", "--standbys", "0"]


@dataclass(frozen=True, slots=True, eq=False)
class Measured:
    """A fault, and the aim for its time."""

    fault: str
    name: str
    aim_s: float
    """Aim, seconds: that of ByteRobust's table 3, or our own for ranks, machines and file systems."""
    aim_of: Literal["found", "reported"]
    """Which of the two times the aim limits."""
    options: dict[str, Any] = field(default_factory=dict)
    words: tuple[str, ...] = ()
    """Arguments of ``everstep drill`` for a fault that needs a separate cluster; empty: it shares a cluster."""


FAULTS = (
    Measured("xid", "kernel fault", 2.0, "found", {"machine": "m1"}),
    Measured("gpu-lost", "GPU lost", 10.0, "found", {"machine": "m1"}),
    Measured("gpu-hot", "temperature", 10.0, "found", {"machine": "m1"}),
    Measured("fs-readonly", "file system read-only", 2.0, "found", {"machine": "m1"}),
    Measured("kill-rank", "rank exit", 0.05, "reported", {"ranks": [3]}),
    Measured("kill-machine", "machine that comes back empty", 3.0, "reported", {"machine": "m1"}),
    Measured(
        "kill-machine", "machine gone", 3.0, "reported", words=("--machine", "m1", "--gone", "--standbys", "1", *SMALL)
    ),
    Measured("nic-down", "NIC down", 30.0, "found", words=("--machine", "m1", *IN_A_NETWORK)),
    Measured("switch-down", "switch down", 60.0, "found", words=(*IN_A_NETWORK,)),
)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10, help="number of runs of each fault (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="make 2 runs of each fault")
    parser.add_argument("--seed", type=int, default=1, help="seed of the random steps (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    runs = 2 if options.quick else options.runs
    results, failures = asyncio.run(measure(runs, options.seed))
    for measured in FAULTS:
        if measured.words:
            found, failed = apart(measured, runs)
            results[measured] = found
            failures += failed
    rows = [row for measured in FAULTS for row in rows_of(measured, results[measured])]
    if options.json:
        every = {measured.name: [result.model_dump() for result in found] for measured, found in results.items()}
        show_json("detection", rows, runs=every, failures=failures)
    else:
        show(
            "detection",
            rows,
            ["The aims limit the time until a fault is found, or reported if a rank or a machine is lost."],
        )
    finish(failures)


Results = dict[Measured, list[DrillResult]]


async def measure(runs: int, seed: int) -> tuple[Results, list[str]]:
    """Inject each fault that needs no separate cluster ``runs`` times, in turns; returns results and failures."""
    results: Results = {measured: [] for measured in FAULTS}
    failures: list[str] = []
    chosen = random.Random(seed)
    async with DrillCluster(machines=SIZES["machines"], standbys=0, workers=2) as cluster:
        references = References()
        for run in range(runs):
            for measured in FAULTS:
                if measured.words:
                    continue
                at_step = chosen.randrange(8, 24)
                request = drill_request(fault=measured.fault, at_step=at_step, steps=STEPS, **SIZES, **measured.options)
                try:
                    check(request)
                    result = await Drill(cluster, request, references).run()
                except CannotInject as error:
                    failures.append(str(error))
                    continue
                except EverstepError as error:
                    failures.append(f"{measured.name}: {error}")
                    continue
                failures += [f"{measured.name}: {problem}" for problem in result.problems]
                results[measured].append(result)
                _show_run(measured, f"run {run + 1} of {runs}", result)
    await asyncio.sleep(0.1)  # the SDK's threads may still be ending
    return results, failures


def apart(measured: Measured, runs: int) -> tuple[list[DrillResult], list[str]]:
    """Inject a fault on a separate cluster, in a separate process, since the drill may enter a network of its own."""
    command = [sys.executable, "-P", "-m", "console.main", "drill", measured.fault, *measured.words]
    done = subprocess.run(
        [*command, "--repeat", str(runs), "--json"], stdout=subprocess.PIPE, text=True, timeout=LIMIT_S, check=False
    )
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        return [], [f"{measured.name}: the drill ended with exit code {done.returncode}"]
    if "refused" in answer:
        return [], [f"{measured.name}: {answer['refused']}"]
    results = [DrillResult.model_validate(run) for run in answer.get("runs", [answer])]
    for result in results:
        _show_run(measured, "apart", result)
    return results, [f"{measured.name}: {problem}" for result in results for problem in result.problems]


def rows_of(measured: Measured, results: Sequence[DrillResult]) -> list[Row]:
    """Return rows with median and maximum of the times until the fault is found and until it is reported."""
    rows = []
    for label, key in (("found", "found_s"), ("reported", "detected_s")):
        times = [seconds for result in results if (seconds := getattr(result, key)) is not None]
        if not times:
            continue
        spread = Spread.of(times)
        name, bound = (
            f"{measured.name} ({measured.fault}), {label}",
            measured.aim_s if label == measured.aim_of else None,
        )
        rows += [
            Row(f"{name}, median", "s", spread.median),
            Row(f"{name}, maximum", "s", spread.maximum, aim=bound, aim_of="ours"),
        ]
    return rows


def _show_run(measured: Measured, which: str, result: DrillResult) -> None:
    say(f"{which}: {measured.name}: found {_s(result.found_s)}, reported {_s(result.detected_s)}")


def _s(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.3f} s"


if __name__ == "__main__":
    main()
