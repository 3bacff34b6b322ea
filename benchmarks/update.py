"""Measures the downtime of a job whose code changes: everstep's hot update, compared with a requeue under torchrun.

The example GPT runs on 8 ranks (tp 2, pp 2, dp 2; on 4 machines of 2 ranks under everstep). One job is updated again
and again, as by ``everstep update --urgent``, each time to a folder in which only a comment differs. Two times are
measured. The first is that from the request to the first step of all ranks with the new code. It includes the trial of
the code, during which the job steps. The second is the downtime: from the last step with the old code to the first step
of all ranks with the new code. Under torchrun the job is ended and started again (a requeue), and its downtime is
measured in the same way. This favours torchrun: there is no queue, no container and no checkpoint.

Three more things are measured: an update of a variable that is read at import, for which fork servers are started
again; recoveries from the end of a rank, with and without a lazy update; and the transfer of code to machines. The
parts of an update's time come from the histories and from the ranks (``benchmarks/update_parts.py``).

    python -P benchmarks/update.py
    python -P benchmarks/update.py --quick --json
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.common import Row, Spread, finish, rows_of, say, show, show_json
from benchmarks.peers.requeue import requeue
from benchmarks.peers.torchrun import INTERRUPTED, PeerFailed
from benchmarks.update_ship import MB, Shipped, ship_to_simulated
from benchmarks.update_side import Switch, UpdatedJob, UpdateSide
from everstep.errors import EverstepError

RANKS, MACHINES = 8, 4
SCRIPT = Path(__file__).resolve().parents[1] / "examples" / "gpt.py"
ARGS = ("--steps", "1000000")
SIZES = ("--tp", "2", "--pp", "2")
AGAINST_REQUEUE, AIM_S, LAZY_AIM_S = 1 / 11, 0.6, 0.1
"""Aims: that of ByteRobust's table 7, and two of our own."""
AT_IMPORT = "TORCH_LOGS_FORMAT"
"""A variable that torch reads at its import: the format of torch's logs. A new value changes nothing else."""
SHIPPED_MB, SIMULATED, SIMULATED_MB, THOUSAND = 100, 1000, 1, 1000


@dataclass(slots=True)
class Results:
    """The measurements of a session."""

    updates: list[Switch] = field(default_factory=list)
    requeues: list[float] = field(default_factory=list)
    at_import: list[Switch] = field(default_factory=list)
    plain: list[Switch] = field(default_factory=list)
    lazy: list[Switch] = field(default_factory=list)
    shipped: list[Shipped] = field(default_factory=list)
    simulated: list[Shipped] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    """Sides that did not run, with the reasons."""

    @contextmanager
    def noting(self, side: str) -> Iterator[None]:
        """Record a failure of the block; the benchmark continues."""
        try:
            yield
        except (PeerFailed, EverstepError, TimeoutError) as error:
            self.failures.append(f"{side}: {error}")
            say(self.failures[-1])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--runs", type=int, default=10, help="number of updates, and of requeues (default: %(default)s)"
    )
    parser.add_argument("--quick", action="store_true", help="make 3 runs")
    parser.add_argument("--seed", type=int, default=1, help="seed of the random ranks that die (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    # SIGTERM acts as Ctrl-C, so that the cluster and the peers are ended.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    results = asyncio.run(measure(3 if options.quick else options.runs, options.seed))
    rows = summarise(results)
    if options.json:
        show_json("update", rows, runs=asdict(results))
    else:
        kinds = {"an urgent update": results.updates, "an update with other imports": results.at_import}
        kinds |= {"a recovery": results.plain, "a recovery with a lazy update": results.lazy}
        notes = [where_it_went(name, found) for name, found in kinds.items()]
        show("update", rows, [note for note in notes if note])
    finish(results.failures)


async def measure(runs: int, seed: int) -> Results:
    """Measure everything on one cluster."""
    results = Results()
    try:
        with tempfile.TemporaryDirectory(prefix="everstep-bench-") as name:
            async with UpdateSide(machines=MACHINES) as cluster:
                async with cluster.job(SCRIPT, ARGS) as job:
                    await _updates(results, job, runs, Path(name))
                    await _recoveries(results, job, runs, random.Random(seed))
                for _ in range(min(runs, 3)):
                    with results.noting("shipping"):
                        results.shipped.append(await cluster.ship(SHIPPED_MB))
            with results.noting("shipping to simulated agents"):
                results.simulated.append(await ship_to_simulated(SIMULATED, megabytes=SIMULATED_MB))
    except asyncio.CancelledError:
        INTERRUPTED.set()
        raise
    # Wait for the SDK's threads: the interpreter can crash if they end after the event loop.
    await asyncio.sleep(0.1)
    return results


async def _updates(results: Results, job: UpdatedJob, runs: int, folder: Path) -> None:
    """Measure updates and requeues in turn; the job is paused while its peer runs."""
    for run in range(runs):
        with results.noting("everstep"):
            results.updates.append(await job.update())
        with results.noting("torchrun"):
            async with job.paused():
                seconds = await asyncio.to_thread(requeue, folder / str(run), SCRIPT, [*ARGS, *SIZES], ranks=RANKS)
            results.requeues.append(seconds)
        say(f"run {run + 1} of {runs}: update {_last(results.updates)}, requeue {results.requeues[-1:]}")
    for run in range(min(runs, 3)):
        with results.noting("everstep, imports anew"):
            results.at_import.append(await job.update({AT_IMPORT: f"run {run} %(message)s"}))
        say(f"imports anew: {_last(results.at_import)}")


async def _recoveries(results: Results, job: UpdatedJob, runs: int, chosen: random.Random) -> None:
    for run in range(2 * runs):
        lazy, rank = run % 2 == 1, chosen.randrange(RANKS)
        with results.noting("everstep, a lazy update" if lazy else "everstep, a recovery"):
            (results.lazy if lazy else results.plain).append(await job.kill(rank, lazy=lazy))
        say(f"recovery: {_last(results.plain)}, with a lazy update: {_last(results.lazy)}")


def _last(found: Sequence[Switch]) -> str:
    return f"{found[-1].request_s:.2f} s, down {found[-1].downtime_s:.2f} s" if found else "-"


def summarise(results: Results) -> list[Row]:
    """Return rows that compare updates with a requeue and with the aims, and rows for lazy updates and transfers."""
    downtimes, requests = (
        [getattr(switch, name) for switch in results.updates] for name in ("downtime_s", "request_s")
    )
    requeues = results.requeues
    rows = rows_of("last step to next step of all ranks, torchrun", "s", downtimes, requeues, aim=AGAINST_REQUEUE)
    rows += rows_of("request to next step of all ranks, torchrun", "s", requests, requeues, aim=AGAINST_REQUEUE)
    rows.append(Row("request to next step of all ranks, median", "s", rows[3].ours, None, AIM_S, aim_of="ours"))
    for name, found in (("downtime", "downtime_s"), ("request to next step of all ranks", "request_s")):
        values = [getattr(switch, found) for switch in results.at_import]
        rows += rows_of(f"imports anew: {name}", "s", values, [], aim=None)[:1]
    plain, lazy = ([switch.request_s for switch in found] for found in (results.plain, results.lazy))
    rows += rows_of("recovery with a lazy update, without", "s", lazy, plain, aim=None)
    if plain and lazy:
        added = Spread.of(lazy).median - Spread.of(plain).median
        rows.append(Row("a lazy update adds, median", "s", added, None, LAZY_AIM_S, aim_of="ours"))
    rows += [row for shipped in (*results.shipped[-1:], *results.simulated[-1:]) for row in _shipping_rows(shipped)]
    return rows


def _shipping_rows(shipped: Shipped) -> list[Row]:
    name = f"{shipped.bytes / MB:.0f} MB to {shipped.machines} machines"
    rate = shipped.bytes * shipped.machines / shipped.seconds / MB
    rows = [Row(name, "s", shipped.seconds), Row(f"{name}, together", "MB/s", rate, larger=True)]
    if shipped.machines < THOUSAND:
        rows.append(Row(f"the same to {THOUSAND}, at that rate", "s", shipped.bytes / MB * THOUSAND / rate))
        rows.append(Row(f"{shipped.bytes / MB:.0f} MB packed and stored", "s", shipped.packed_s))
    return rows


def where_it_went(name: str, found: Sequence[Switch]) -> str:
    """Return a table of the parts, with median and maximum."""
    if not found:
        return ""
    lines = [f"{f'Parts of {name} (s)':34} {'median':>7} {'max':>7}"]
    for part in found[0].parts:
        spread = Spread.of([switch.parts.get(part, 0.0) for switch in found])
        lines.append(f"  {part:32} {spread.median:7.3f} {spread.maximum:7.3f}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
