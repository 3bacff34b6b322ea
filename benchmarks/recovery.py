"""Measures the time from a SIGKILL of a rank to the next step of all ranks: everstep, torchrun, and NVRx in-process.

The example GPT runs on 8 ranks (tp 2, pp 2, dp 2; on 4 machines of 2 ranks under everstep). A random rank is killed
between backward and the optimizer's step. The sides take turns and change their order, so that other programs disturb
all of them alike. The measured time is that from the mark of the fault to the first step that all ranks have completed.
everstep restores the state of the previous step and saves the state of the new one. torchrun starts the training from
the beginning, since the script has no other checkpoint. NVRx restarts the surviving processes and continues a toy loop
with 7 ranks.

    python -P benchmarks/recovery.py
    python -P benchmarks/recovery.py --quick --json
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
from benchmarks.everstep_side import EverstepSide
from benchmarks.peers import nvrx, torchrun
from benchmarks.peers.torchrun import INTERRUPTED, PeerFailed
from benchmarks.timeline import PARTS, UNACCOUNTED, Recovery
from everstep.errors import EverstepError

RANKS, MACHINES = 8, 4
SCRIPT = Path(__file__).resolve().parents[1] / "examples" / "gpt.py"
SCRIPT_ARGS = ("--steps", "1000000", "--tp", "2", "--pp", "2")
FIRST_STEP, LAST_STEP = 20, 40
"""The fault strikes in a step between these two, after all costs of the start."""
AGAINST_TORCHRUN, STRETCH, AGAINST_NVRX, AIM_S = 1 / 5, 1 / 8, 1.0, 0.5


@dataclass(slots=True)
class Results:
    """All recoveries of a session."""

    ours: list[Recovery] = field(default_factory=list)
    torchrun: list[Recovery] = field(default_factory=list)
    nvrx: list[Recovery] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    """Sides that did not run or did not recover, with the reasons."""
    runs: int = 0
    """Number of faults for each side."""

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
    parser.add_argument("--runs", type=int, default=10, help="number of recoveries of each side (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="make 3 runs")
    parser.add_argument("--seed", type=int, default=1, help="seed of the random ranks and steps (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--peers", default="torchrun,nvrx", help="the peers to run: torchrun, nvrx (default: both)")
    options = parser.parse_args()
    # SIGTERM acts as Ctrl-C, so that the cluster and the peers are ended.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    results = asyncio.run(measure(3 if options.quick else options.runs, options.seed, options.peers.split(",")))
    rows = summarise(results)
    if options.json:
        runs = {
            name: [asdict(recovery) for recovery in getattr(results, name)] for name in ("ours", "torchrun", "nvrx")
        }
        show_json("recovery", rows, runs=runs, failures=results.failures)
    else:
        notes = [where_it_went("everstep", results.ours), where_it_went("torchrun", results.torchrun)]
        show("recovery", rows, [note for note in notes if note])
    finish(results.failures)


async def measure(runs: int, seed: int, peers: Sequence[str]) -> Results:
    """Alternate the sides on one cluster."""
    results = Results()
    try:
        await _measure(results, runs, random.Random(seed), peers)
    except asyncio.CancelledError:
        INTERRUPTED.set()
        raise
    # Wait for the SDK's threads: the interpreter can crash if they end after the event loop.
    await asyncio.sleep(0.1)
    return results


async def _measure(results: Results, runs: int, chosen: random.Random, peers: Sequence[str]) -> None:
    with tempfile.TemporaryDirectory(prefix="everstep-bench-") as name:
        sides: list[Torchrun | Nvrx] = [Torchrun(results)] if "torchrun" in peers else []
        if "nvrx" in peers and (found := await asyncio.to_thread(Nvrx.made, results)):
            sides.append(found)
        async with EverstepSide(machines=MACHINES) as cluster:
            for run in range(runs):
                rank, at_step = chosen.randrange(RANKS), chosen.randrange(FIRST_STEP, LAST_STEP)
                turns: list[Torchrun | Nvrx | None] = [None, *sides]
                for side in turns if run % 2 == 0 else turns[::-1]:
                    if side is None:
                        with results.noting("everstep"):  # the job defines the sizes: no arguments needed
                            ours = await cluster.recover(SCRIPT, SCRIPT_ARGS[:2], rank=rank, at_step=at_step)
                            results.ours.append(ours)
                    else:
                        folder = Path(name) / f"{type(side).__name__}-{run}"
                        await asyncio.to_thread(side.recover, folder, rank, at_step)
                results.runs = run + 1
                say(f"run {run + 1} of {runs}: rank {rank} at step {at_step}: {_last(results)}")


class Torchrun:
    """torchrun's turn."""

    def __init__(self, results: Results) -> None:
        self._results = results

    def recover(self, folder: Path, rank: int, at_step: int) -> None:
        """Measure one recovery; a failure is recorded."""
        with self._results.noting("torchrun"):
            found = torchrun.recover(folder, SCRIPT, SCRIPT_ARGS, ranks=RANKS, rank=rank, at_step=at_step)
            self._results.torchrun.append(found)


class Nvrx:
    """NVRx's turn."""

    def __init__(self, results: Results, interpreter: Path) -> None:
        self._results = results
        self._interpreter = interpreter

    @classmethod
    def made(cls, results: Results) -> Nvrx | None:
        """Make the side with its environment; None: the environment cannot be made, which is recorded."""
        with results.noting("NVRx in-process"):
            return cls(results, nvrx.python())
        return None

    def recover(self, folder: Path, rank: int, at_step: int) -> None:
        """Measure one recovery; a failure is recorded. Instead of rank 0, which has the store, rank 1 is killed."""
        with self._results.noting("NVRx in-process"):
            found = nvrx.recover(self._interpreter, folder, ranks=RANKS, rank=max(rank, 1), at_step=at_step)
            self._results.nvrx.append(found)


def _last(results: Results) -> str:
    sides = {"everstep": results.ours, "torchrun": results.torchrun, "NVRx": results.nvrx}
    return ", ".join(f"{name} {found[-1].seconds:.2f} s" for name, found in sides.items() if found)


def summarise(results: Results) -> list[Row]:
    """Return rows that compare everstep with each peer and with the aim, and rows for the parts."""
    ours, other, shrunk = ([run.seconds for run in found] for found in (results.ours, results.torchrun, results.nvrx))
    if not ours:
        return [_recovered(results, name) for name in ("torchrun", "nvrx")]
    what = "fault to next step of all ranks"
    rows = rows_of(f"{what}, torchrun", "s", ours, other, aim=AGAINST_TORCHRUN)
    median = Spread.of(ours).median
    rows.append(Row(f"{what}, torchrun, second aim", "s", median, rows[0].peer, STRETCH))
    rows += rows_of(f"{what}, NVRx (7 of 8 ranks)", "s", ours, shrunk, aim=AGAINST_NVRX)
    rows.append(Row(f"{what}, median", "s", median, None, AIM_S, aim_of="ours"))
    for part in (*PARTS, UNACCOUNTED):
        rows.append(Row(f"part: {part}, median", "s", Spread.of([run.parts[part] for run in results.ours]).median))
    return [*rows, *(_recovered(results, name) for name in ("torchrun", "nvrx"))]


def _recovered(results: Results, peer: str) -> Row:
    """Return the row with the number of runs that recovered: only they have times."""
    name = f"recovered, of {results.runs} runs, {peer}"
    return Row(name, "runs", len(results.ours), len(getattr(results, peer)), larger=True)


def where_it_went(name: str, found: Sequence[Recovery]) -> str:
    """Return a table of the parts, with median, p90, maximum, and share of the total."""
    if not found:
        return ""
    total = sum(run.seconds for run in found)
    lines = [f"Where {name}'s time went (s)            median     p90     max   share of all"]
    for part in found[0].parts:
        values = [run.parts[part] for run in found]
        spread = Spread.of(values)
        share = sum(values) / total
        lines.append(f"  {part:32} {spread.median:7.3f} {spread.p90:7.3f} {spread.maximum:7.3f} {share:10.1%}")
    spread = Spread.of([run.seconds for run in found])
    lines.append(f"  {'total':32} {spread.median:7.3f} {spread.p90:7.3f} {spread.maximum:7.3f} {1:10.1%}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
