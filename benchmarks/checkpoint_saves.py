"""Measures the time for which a save blocks the training thread; the sides take turns, each turn in new processes."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.checkpoint_rank import FIRST, PARAMETERS, SIDES, Sample, Settings
from benchmarks.common import Row, Spread, rows_of, say
from benchmarks.peers import environments
from benchmarks.peers.savers import DLROVER_RUN, clean_dlrover
from benchmarks.peers.torchrun import PeerFailed, last_words
from everstep.rank import environment
from everstep.rank.step_reports import ReportFile

RANKS = 2
AGAINST_DLROVER, AGAINST_STAGER = 1 / 10, 1 / 2
LIMIT_S = 300.0
ROOT = Path(__file__).resolve().parents[1]
DLROVER = "DLRover memory"
DLROVER_MODULE = "dlrover.trainer.torch.flash_checkpoint.ddp"
DLROVER_PACKAGES = (
    "dlrover==0.6.1",
    "certifi",
    "charset-normalizer",
    "deprecated",
    "idna",
    "packaging",
    "psutil",
    "pynvml",
    "requests",
    "urllib3",
    "wrapt",
)
WARM = 4
"""Number of saves that are not counted; after them all three slots have memory."""


@dataclass(slots=True)
class Saves:
    """All samples for one size of state."""

    megabytes: int
    ranks: int = RANKS
    parameters: int = PARAMETERS
    """Number of the model's tensors; with two moments each, three times as many are saved."""
    samples: dict[str, list[Sample]] = field(default_factory=dict)
    first: dict[str, list[Sample]] = field(default_factory=dict)
    """Samples of the first saves, which touch new memory."""
    failures: list[str] = field(default_factory=list)

    @property
    def what(self) -> str:
        """The state in words."""
        return f"{self.megabytes} MB in {3 * self.parameters:,} tensors"

    def blocking(self, side: str) -> list[float]:
        """Return the blocking times of the saves, without the wait for earlier saves, seconds."""
        return _blocking(self.samples.get(side, []))

    def rows(self) -> list[Row]:
        """Return rows that compare everstep with the other sides."""
        name = f"save of {self.what} blocks"
        ours = self.blocking("everstep")
        rows = rows_of(f"{name}, DLRover", "s", ours, self.blocking(DLROVER), aim=AGAINST_DLROVER)
        rows += rows_of(f"{name}, DCP's stager", "s", ours, self.blocking("DCP stager"), aim=AGAINST_STAGER)
        for side in ("DCP async", "blocking copy", "everstep blocking"):
            rows += rows_of(f"{name}, {side}", "s", ours, self.blocking(side), aim=None)
        first = _blocking(self.first.get("everstep", []))
        for side in (DLROVER, "DCP stager", "blocking copy"):
            fresh = _blocking(self.first.get(side, []))
            rows += rows_of(f"first {FIRST} saves of {self.what} block, {side}", "s", first, fresh, aim=None)
        return rows

    def table(self) -> str:
        """Return a table with a line for each side."""
        lines = [
            f"Saves of {self.what} a rank, {self.ranks} ranks (s)",
            f"  {'':18} {'blocking':>8} {'p90':>8} {'max':>8}   "
            f"{'save':>8} {'gate':>8} {'earlier':>8} {'step':>8} {'n':>4}",
        ]
        lines += _lines(self.samples)
        lines += [f"  The first {FIRST} of each turn:", *_lines(self.first)]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Turn:
    """The samples of one side's turn, from all ranks that saved."""

    first: list[Sample]
    steady: list[Sample]


def _blocking(samples: Sequence[Sample]) -> list[float]:
    return [sample.save + sample.gate for sample in samples]


def _lines(samples: Mapping[str, Sequence[Sample]]) -> list[str]:
    """Return a line of the table for each side."""
    lines = []
    for side, found in samples.items():
        spread = Spread.of(_blocking(found))
        parts = (
            Spread.of([getattr(sample, part) for sample in found]).median for part in ("save", "gate", "waited", "step")
        )
        numbers = " ".join(f"{value:8.4f}" for value in parts)
        lines.append(
            f"  {side:18} {spread.median:8.4f} {spread.p90:8.4f} {spread.maximum:8.4f}   {numbers} {spread.runs:4}"
        )
    return lines


def measure(states: Sequence[tuple[int, int]], *, rounds: int, steps: int, sides: Sequence[str]) -> list[Saves]:
    """Let the sides take turns, in reverse order in every second round; return the samples for each state.

    Args:
        states: For each state of a rank, its size, MB, and the number of parameters.
        rounds: Number of turns of each side.
        steps: Number of saves that are measured in a turn.
        sides: Names of the sides.
    """
    results = [Saves(size, parameters=parameters) for size, parameters in states]
    interpreters = {side: Path(sys.executable) for side in sides}
    if DLROVER in interpreters:
        try:
            interpreters[DLROVER] = environments.python("dlrover", DLROVER_PACKAGES, DLROVER_MODULE)
        except PeerFailed as error:
            del interpreters[DLROVER]
            results[0].failures.append(f"{DLROVER}: {error}")
            say(results[0].failures[-1])
    calls = calibrate()
    for result in results:
        for turn in range(rounds):
            order = list(interpreters) if turn % 2 == 0 else list(interpreters)[::-1]
            for side in order:
                try:
                    turned = run_turn(
                        side, interpreters[side], result.megabytes, calls, steps=steps, parameters=result.parameters
                    )
                except PeerFailed as error:
                    result.failures.append(f"{side}: {error}")
                    say(result.failures[-1])
                    continue
                result.samples.setdefault(side, []).extend(turned.steady)
                result.first.setdefault(side, []).extend(turned.first)
                blocked = Spread.of(_blocking(turned.steady))
                say(f"{result.what}, round {turn + 1} of {rounds}: {side} blocks {blocked.median:.4f} s")
        result.samples = {side: result.samples[side] for side in SIDES if side in result.samples}
        result.first = {side: result.first[side] for side in result.samples}
    return results


def calibrate(ranks: int = RANKS, device: str = "cpu") -> int:
    """Measure how many matrix products keep each rank busy for a second while all ranks compute."""
    with scratch() as folder:
        settings = [Settings("none", 1, 0, 0, 0, str(folder), rank, ranks, device) for rank in range(ranks)]
        found = _run(settings, Path(sys.executable), {})
    return round(float(sum(result["calls_per_second"] for result in found)) / len(found))


def run_turn(
    side: str,
    interpreter: Path,
    megabytes: int,
    calls: int,
    *,
    steps: int,
    ranks: int = RANKS,
    device: str = "cpu",
    parameters: int = PARAMETERS,
) -> Turn:
    """Run one side's turn.

    Raises:
        PeerFailed: a rank failed.
    """
    with scratch() as folder:
        run = folder.name
        settings = [
            Settings(side, megabytes, calls, WARM, steps, str(folder), rank, ranks, device, parameters)
            for rank in range(ranks)
        ]
        variables = {DLROVER_RUN: run, "DLROVER_LOG_LEVEL": "WARNING"} if side == DLROVER else {}
        if side.startswith("everstep"):
            variables = everstep_environment(folder, ranks, overlap=side == "everstep")
        try:
            results = _run(settings, interpreter, variables)
        finally:
            clean_dlrover(run)
        saving = results[:1] if side == DLROVER else results
        first, steady = (
            [Sample(**sample) for result in saving for sample in result[which]] for which in ("first", "samples")
        )
        return Turn(first, steady)


def everstep_environment(folder: Path, ranks: int, *, overlap: bool) -> dict[str, str]:
    """Make the report files, and return the variables that an agent sets for ranks; ``{rank}`` is a placeholder."""
    for rank in range(ranks):
        ReportFile.create(folder / f"report-{rank}", rank=rank, generation=1).close()
    return {
        environment.REPORT_FILE: f"{folder}/report-{{rank}}",
        environment.CHECKPOINT_FILE: f"{folder}/checkpoint-{{rank}}",
        environment.CHECKPOINT_SLOTS: "3",
        environment.CHECKPOINT_OVERLAP: str(int(overlap)),
        environment.TOPOLOGY: f"1,{ranks},1,1,pp-dp-tp",
        environment.GENERATION: "1",
    }


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A folder in shared memory for one turn."""
    folder = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="everstep-benchmark-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run(settings: Sequence[Settings], interpreter: Path, variables: dict[str, str]) -> list[dict[str, Any]]:
    """Run the ranks, end all their processes, and return their results.

    Raises:
        PeerFailed: a rank left no result.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    started = []
    folder = Path(settings[0].folder)
    try:
        for one in settings:
            paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
            env = dict(os.environ) | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths, "PYTHONWARNINGS": "ignore"}
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}
            env |= {"RANK": str(one.rank), "LOCAL_RANK": str(one.rank)}
            env |= {"WORLD_SIZE": str(one.ranks), "LOCAL_WORLD_SIZE": str(one.ranks)}
            env |= {name: value.format(rank=one.rank) for name, value in variables.items()}
            command = [str(interpreter), "-P", "-m", "benchmarks.checkpoint_rank", json.dumps(asdict(one))]
            with (folder / f"output-{one.rank}").open("wb") as file:
                started.append(subprocess.Popen(command, env=env, stdout=file, stderr=file, start_new_session=True))
        deadline = time.monotonic() + LIMIT_S
        while any(process.poll() is None for process in started):
            if time.monotonic() > deadline or any(process.poll() for process in started):
                break
            time.sleep(0.05)
    finally:
        for process in started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    results = []
    for one in settings:
        path = folder / f"rank-{one.rank}.json"
        if not path.exists():
            raise PeerFailed(
                f"rank {one.rank} left no result; its last output: {last_words(folder / f'output-{one.rank}')}"
            )
        results.append(json.loads(path.read_text()))
    return results
