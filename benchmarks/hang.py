"""Measures the time from a hang until the job steps again without the machine at fault, with the default settings.

The job has 8 ranks on 4 machines (tp 2, pp 2, dp 2) and two standbys. Its model is so small that the ranks are idle
during most of each step of 0.1 s; the duration of the steps is shown. Each fault is injected several times as a drill,
at random steps. Without everstep, a hang ends with a time-out of 10 to 60 minutes.

    python -P benchmarks/hang.py
    python -P benchmarks/hang.py --quick --json
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import Sequence
from typing import Any

from benchmarks.common import Row, Spread, finish, say, show, show_json
from drills import Drill, DrillCluster, DrillResult, drill_request
from drills.runner import References
from drills.spec.request import example
from everstep.errors import EverstepError
from everstep.model.recovery_policy import RecoveryPolicy
from everstep.model.stage import Stage

SIZES: dict[str, Any] = {"machines": 4, "ranks_per_machine": 2, "tp": 2, "pp": 2}
STEPS, STEP_S = 70, 0.1
SMALL = ["--dim", "16", "--heads", "2", "--layers", "2", "--seq", "8", "--batch", "2", "--microbatches", "2"]
"""Arguments of the example. It has little to compute, but every kind of communication."""
AIMS = {"stop-rank": 1.5, "deadlock": 5.0, "skip-collective": 5.0, "hang-dataloader": 5.0}
"""Fault → seconds until all ranks step again."""
TRACE_S = 0.5
"""Aim for taking the samples of 8 ranks, without the pauses between samples, seconds."""
PARTS = ((Stage.TRACE,), (Stage.STOP,), (Stage.EVICT,), (Stage.RESTORE,), (Stage.REATTEMPT, Stage.CONFIRM))
DEFAULTS = {name: RecoveryPolicy().value(name) for name in ("hang.floor_s", "hang.idle_floor_s", "hang.stopped_s")}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="number of runs of each fault (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="make 1 run of each fault")
    parser.add_argument("--seed", type=int, default=1, help="seed of the random steps and ranks (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    results, failures = asyncio.run(measure(1 if options.quick else options.runs, options.seed))
    steps = [result.step_s for found in results.values() for result in found if result.step_s is not None]
    rows = [Row("a step before the fault, median", "s", Spread.of(steps).median)] if steps else []
    rows += [row for fault, found in results.items() for row in rows_of(fault, found)]
    if options.json:
        every = {fault: [result.model_dump() for result in found] for fault, found in results.items()}
        show_json("hang", rows, runs=every, failures=failures)
    else:
        show("hang", rows, ["The time of a stage is the sum of its parts; a second stop follows an eviction."])
    finish(failures)


async def measure(runs: int, seed: int) -> tuple[dict[str, list[DrillResult]], list[str]]:
    """Inject each fault ``runs`` times, in turns; return the results and the failures."""
    results: dict[str, list[DrillResult]] = {fault: [] for fault in AIMS}
    failures: list[str] = []
    chosen, world = random.Random(seed), SIZES["machines"] * SIZES["ranks_per_machine"]
    async with DrillCluster(machines=SIZES["machines"], standbys=SIZES["pp"], workers=2) as cluster:
        references = References()
        for run in range(runs):
            for fault in AIMS:
                request = drill_request(
                    fault=fault,
                    ranks=[chosen.randrange(world)],
                    at_step=chosen.randrange(20, 40),
                    script=[str(example("gpt.py")), *SMALL, "--steps", str(STEPS), "--step-seconds", str(STEP_S)],
                    policy=DEFAULTS,
                    **SIZES,
                )
                try:
                    result = await Drill(cluster, request, references).run()
                except EverstepError as error:
                    failures.append(f"{fault}: {error}")
                    continue
                failures += [f"{fault}: {problem}" for problem in result.problems]
                results[fault].append(result)
                say(f"run {run + 1} of {runs}: {fault}: {in_words(result)}")
    await asyncio.sleep(0.1)  # the SDK's threads may still be ending
    return results, failures


def in_words(result: DrillResult) -> str:
    """Return one run as a line of progress."""
    stages = ", ".join(f"{name} {seconds:.2f}" for name, seconds in result.stages)
    return (
        f"steps of {result.step_s or 0:.2f} s, reported {result.detected_s} s ({stages}), again {result.recovered_s} s"
    )


def rows_of(fault: str, results: Sequence[DrillResult]) -> list[Row]:
    """Return rows of the times until the incident opens, of the stages, and until all ranks step again."""
    rows = []
    times = [result.detected_s for result in results if result.detected_s is not None]
    if times:
        rows.append(Row(f"{fault}, reported, median", "s", Spread.of(times).median))
    for stages in PARTS:
        took = [sum(seconds for name, seconds in result.stages if name in stages) for result in results]
        if took:
            aim = TRACE_S if stages == (Stage.TRACE,) and fault == "stop-rank" else None
            rows.append(
                Row(f"{fault}, {' and '.join(stages)}, median", "s", Spread.of(took).median, aim=aim, aim_of="ours")
            )
    times = [result.recovered_s for result in results if result.recovered_s is not None]
    if times:
        spread = Spread.of(times)
        rows += [
            Row(f"{fault}, all ranks step again, median", "s", spread.median, aim=AIMS[fault], aim_of="ours"),
            Row(f"{fault}, all ranks step again, maximum", "s", spread.maximum),
        ]
    return rows


if __name__ == "__main__":
    main()
