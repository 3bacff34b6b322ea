"""Measures how much a job is slowed down because everstep watches it.

Two ranks run on one machine under everstep, and their steps have collectives. They report their steps, and have torch's
server for flight records. A real agent follows them and a real worker watches the job. The aim limits the time of
everstep's calls in a step, by the CPU clock of the thread that makes them. Further costs show in the steps. For each
reported step, the ranks also make one step in the same process that is not reported. The CPU times of all threads are
compared. The same script runs under torchrun too, and takes turns with these ranks. Two processes of one program differ
by some per cent, so both sides are started several times. The CPU time of server, agent and worker is shown too.

Checkpoints (``benchmarks/checkpoint.py``) and inspections (``benchmarks/monitor.py``) are not included. The settings of
flight records are torch's defaults on both sides.

    python -P benchmarks/watching.py
    python -P benchmarks/watching.py --quick --json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks.blocks import Blocks, fastest, interval, mean, median
from benchmarks.common import Row, finish, say, show, show_json
from benchmarks.everstep_side import LIMIT_S, EverstepSide
from controlplane.local import cluster as local
from controlplane.start_checks.code import start_recorded
from everstep.errors import ClusterError, EverstepError
from everstep.model.job import JobSpec
from everstep.model.recovery_policy import RecoveryPolicy

SCRIPT = Path(__file__).with_name("watching_rank.py")
AIM = 0.005
"""The aim: everstep's calls use at most this share of the CPU time of a step."""
RANKS, STEPS, WARM = 2, 20, 1
"""Number of ranks, of steps in a block, and of pairs of blocks that are not counted."""
PAUSE_S = 3600.0
POLICY = RecoveryPolicy(hang={"idle_floor_s": PAUSE_S, "floor_s": PAUSE_S, "stopped_s": PAUSE_S}, slow={"after_s": 0.0})
"""The job's policy: no incident opens because ranks are slow, or because they wait while the other side has its
turn."""
KINDS: dict[str, Callable[[Blocks], float]] = {"fastest tenth": fastest, "median": median, "mean": mean}
IDLE_S = 10.0
"""Time for which agent and worker are measured without a job, seconds."""
SERIES = (("with", "cpu"), ("with", "wall"), ("with", "bare_cpu"), ("with", "bare_wall"), ("without", "cpu"))
"""The series of steps that ranks measure: side, and kind of step and clock."""


@dataclass(slots=True)
class Found:
    """The measurements."""

    steps: dict[tuple[str, str], list[list[list[float]]]] = field(
        default_factory=lambda: {series: [] for series in SERIES}
    )
    """Series → start → block → seconds of each step, the mean of both ranks."""
    own: list[float] = field(default_factory=list)
    """CPU seconds of everstep's calls in each step."""
    shares: dict[str, list[float]] = field(default_factory=lambda: {"server in a rank": [], "agent": [], "worker": []})
    """Part → share of one core per rank while the job runs, for each start."""
    idle: dict[str, float] = field(default_factory=dict)
    """Part → share of one core per rank without a job."""
    failures: list[str] = field(default_factory=list)

    def blocks(self, side: str, kind: str) -> list[list[float]]:
        """Return the blocks of all starts."""
        return [block for start in self.steps[side, kind] for block in start]

    def starts(self, side: str, kind: str) -> list[list[float]]:
        """Return one block for each start."""
        return [[step for block in start for step in block] for start in self.steps[side, kind]]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=8, help="number of starts of both sides (default: %(default)s)")
    parser.add_argument(
        "--pairs", type=int, default=20, help="number of pairs of blocks in each start (default: %(default)s)"
    )
    parser.add_argument("--quick", action="store_true", help="make 3 starts with 4 pairs each")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    starts, pairs = (3, 4) if options.quick else (options.starts, options.pairs)
    found = asyncio.run(measure(starts, pairs))
    rows, notes = rows_of(found)
    if not rows:
        finish(found.failures)
    if options.json:
        show_json("watching", rows, notes=notes, failures=found.failures)
    else:
        show("watching", rows, notes)
    finish(found.failures)


async def measure(starts: int, pairs: int) -> Found:
    """Start both sides several times; a start that fails is recorded."""
    found = Found()
    async with WatchedSide(machines=1) as side:
        before = side.cpu_s()
        await asyncio.sleep(IDLE_S)
        found.idle = {name: (now - before[name]) / IDLE_S / RANKS for name, now in side.cpu_s().items()}
        for number in range(starts):
            try:
                shares, steps, own = await side.by_turns(f"watch-{number}", pairs)
            except (EverstepError, OSError, TimeoutError) as error:
                found.failures.append(f"start {number + 1}: {str(error) or 'not in time'}")
                continue
            for name, share in shares.items():
                found.shares[name].append(share)
            found.own += own
            for series, blocks in steps.items():
                found.steps[series].append(blocks)
            means = (f"{mean(steps[series]) * 1e3:.3f}" for series in (SERIES[0], SERIES[2], SERIES[4]))
            say(f"start {number + 1} of {starts}: ms of CPU a step: {', '.join(means)} (reported, not, torchrun)")
    return found


class WatchedSide(EverstepSide):
    """A cluster of one machine, and the same script under torchrun."""

    def cpu_s(self) -> dict[str, float]:
        """Return the CPU seconds of the agent and of the worker, without the agent's children."""
        cluster = self._control.cluster
        assert cluster is not None, "it is local"
        pids = local.processes(cluster)
        named = {"agent": "agent-m0", "worker": "worker-0"}
        return {name: sum(psutil.Process(pids[process]).cpu_times()[:2]) for name, process in named.items()}

    async def by_turns(
        self, name: str, pairs: int
    ) -> tuple[dict[str, float], dict[tuple[str, str], list[list[float]]], list[float]]:
        """Run both sides in turn.

        Returns:
            The values for ``Found``: shares, the steps of each series block by block, and ``own``.

        Raises:
            ClusterError: one of the sides does not run.
        """
        folder = self._folder / name
        folder.mkdir()
        (folder / "turn").write_bytes(bytes(8))
        args = [str(folder), "with", str(WARM + pairs), str(STEPS)]
        spec = JobSpec(name=name, script=str(SCRIPT), args=args, ranks_per_machine=RANKS, policy=POLICY)
        await start_recorded(self._control, spec, self._control.machines)
        peer = self._torchrun(folder, args)
        try:
            await self._at_turn(folder, 2 * WARM, peer)
            began_s, before = time.monotonic(), self.cpu_s()
            await self._at_turn(folder, 2 * (WARM + pairs), peer)
            lasted_s, after = time.monotonic() - began_s, self.cpu_s()
            async with asyncio.timeout(LIMIT_S):
                await self._control.result(name)
                await asyncio.to_thread(peer.wait)
        finally:
            peer.terminate()  # torchrun ends its ranks
            await asyncio.to_thread(peer.wait)
            with suppress(EverstepError):  # the job is over
                await self._control.stop(name, "measured")
        measured = {
            side: [json.loads((folder / f"{side}-{rank}.json").read_text()) for rank in range(RANKS)]
            for side in ("with", "without")
        }
        shares = {which: (now - before[which]) / lasted_s / RANKS for which, now in after.items()}
        shares["server in a rank"] = sum(rank["server"] for rank in measured["with"]) / RANKS
        steps = {(side, kind): both([rank[kind][WARM:] for rank in measured[side]]) for side, kind in SERIES}
        return shares, steps, [seconds for rank in measured["with"] for seconds in rank["own"][WARM * STEPS :]]

    def _torchrun(self, folder: Path, args: Sequence[str]) -> subprocess.Popen[bytes]:
        command = [str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc-per-node", str(RANKS)]
        command += [str(SCRIPT), args[0], "without", *args[2:]]
        with (folder / "torchrun.log").open("wb") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"})

    async def _at_turn(self, folder: Path, turn: int, peer: subprocess.Popen[bytes]) -> None:
        """Wait until this turn is reached."""
        async with asyncio.timeout(LIMIT_S + turn * 10.0):
            while int.from_bytes((folder / "turn").read_bytes(), "little") < turn:
                if peer.poll():
                    raise ClusterError(f"torchrun: {(folder / 'torchrun.log').read_text()[-300:]}")
                await asyncio.sleep(0.05)


def both(ranks: Sequence[Blocks]) -> list[list[float]]:
    """Return the mean of all ranks in each step, block by block."""
    return [[sum(step) / len(step) for step in zip(*blocks, strict=True)] for blocks in zip(*ranks, strict=True)]


def rows_of(found: Found) -> tuple[list[Row], list[str]]:
    """Return rows that compare the steps and show CPU times, and notes with confidence intervals."""
    if not found.shares["agent"]:
        return [], []
    rows: list[Row] = []
    notes: list[str] = []

    def compare(words: str, ours: Blocks, peer: Blocks) -> None:
        for name, of in KINDS.items():
            rows.append(Row(f"{words}, {name}", "ms", of(ours) * 1e3, of(peer) * 1e3))
            low, high = (1 / (1 - loss) for loss in interval(ours, peer, of))
            notes.append(f"{words}, {name}: {of(ours) / of(peer):.4f} (95 % interval {low:.4f} to {high:.4f}).")

    bare, own_s = found.blocks(*SERIES[2]), mean([found.own])
    rows.append(Row("the calls of everstep in a step, mean", "us", own_s * 1e6))
    rows.append(Row("the same, of the CPU of a step", "share", own_s / mean(bare), None, AIM, "ours"))
    rows.append(Row("the same, of a step of 0.1 s", "share", own_s / 0.1))
    compare("CPU of a rank in a step, reported or not", found.blocks(*SERIES[0]), bare)
    compare("the same step by the wall clock", found.blocks(*SERIES[1]), found.blocks(*SERIES[3]))
    compare("CPU in a step, beside torchrun", found.starts(*SERIES[0]), found.starts(*SERIES[4]))
    for name, shares in found.shares.items():
        used = sum(shares) / len(shares)
        rows.append(Row(f"{name}, of one core", "share", used))
        if name in found.idle:
            rows.append(Row(f"{name}, more than without a job", "share", used - found.idle[name]))
    notes.append("Shares of a core are by rank. Intervals are over blocks of steps; beside torchrun over starts.")
    return rows, notes


if __name__ == "__main__":
    main()
