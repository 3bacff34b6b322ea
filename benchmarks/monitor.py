"""Measures the cost of inspections: the CPU time of an agent with and without them, and the effect on training steps.

Two real agents run on this computer for some time, one with all inspections at their default periods and one without
any, and their CPU times are compared. Then steps of a small model are measured in blocks of some seconds. In the first
block of a pair one agent runs and the other agent is stopped (SIGSTOP); in the second block it is the other way round.
The order changes from pair to pair. An agent that resumes runs all inspections that are due, so a block has more
inspections than usual.

    python -P benchmarks/monitor.py
    python -P benchmarks/monitor.py --quick --json
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from benchmarks.blocks import fastest, interval, mean, median
from benchmarks.common import Row, finish, say, show, show_json

CORE_SHARE, STEP_RATIO = 0.01, 1.01
"""Aims: share of one core, and ratio of the durations of a step."""
BLOCK_S, SIZE = 10.0, 256
"""Length of a block, seconds (the period of GPU inspections); width of the matrices."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--seconds", type=float, default=120.0, help="seconds for which CPU time is measured (default: %(default)s)"
    )
    parser.add_argument(
        "--pairs", type=int, default=15, help="number of pairs of blocks of 10 s of steps (default: %(default)s)"
    )
    parser.add_argument("--quick", action="store_true", help="measure 20 seconds and 3 pairs")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    seconds, pairs = (20.0, 3) if options.quick else (options.seconds, options.pairs)
    with (
        tempfile.TemporaryDirectory(prefix="everstep-bench-") as folder,
        agent(Path(folder) / "with", "") as inspecting,
        agent(Path(folder) / "without", "off = true") as idle,
    ):
        say("both agents are up")
        time.sleep(5)  # the start of the agents does not count
        before = [_cpu_s(process) for process in (inspecting, idle)]
        time.sleep(seconds)
        shares = [(_cpu_s(process) - used) / seconds for process, used in zip((inspecting, idle), before, strict=True)]
        say(f"{shares[0]:.2%} and {shares[1]:.2%} of one core")
        beside, alone = _steps(inspecting, idle, pairs)
    rows = [
        Row("CPU of an agent with all inspections, of one core", "share", shares[0], shares[1]),
        Row("CPU of the inspections, of one core", "share", shares[0] - shares[1], None, CORE_SHARE, "ours"),
    ]
    notes = ["The peer is the same agent without inspections."]
    for name, of in (("fastest tenth", fastest), ("median", median), ("mean", mean)):
        low, high = (1 / (1 - loss) for loss in interval(beside, alone, of))
        rows.append(Row(f"a training step beside it, {name}", "s", of(beside), of(alone), STEP_RATIO))
        notes.append(f"A step beside it, {name}: {of(beside) / of(alone):.4f} (95 % interval {low:.4f} to {high:.4f}).")
    if options.json:
        show_json("monitor", rows, notes=notes)
    else:
        show("monitor", rows, notes)
    finish([])


@contextmanager
def agent(folder: Path, settings: str) -> Iterator[psutil.Process]:
    """Run a real agent with these settings of its monitor while the block runs."""
    folder.mkdir()
    (folder / "monitor.toml").write_text(settings)
    shm = Path("/dev/shm") / f"everstep-bench-{os.getpid()}-{folder.name}"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-P", "-m", "console.main", "agent", "--machine", folder.name, "--insecure"]
    command += ["--listen", f"127.0.0.1:{port}", "--state-dir", str(folder / "state"), "--shm-dir", str(shm)]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([*command, "--monitor", str(folder / "monitor.toml")], stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 60
        while "agent serves" not in (folder / "log").read_text():
            if time.monotonic() > deadline or process.poll() is not None:
                sys.exit(f"the agent does not come up: {(folder / 'log').read_text()[-500:]}")
            time.sleep(0.1)
        yield psutil.Process(process.pid)
    finally:
        process.send_signal(signal.SIGCONT)
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()
        subprocess.run(["rm", "-rf", str(shm)], check=False)


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _steps(inspecting: psutil.Process, idle: psutil.Process, pairs: int) -> tuple[list[list[float]], list[list[float]]]:
    """Return the durations of steps, block by block: those while ``inspecting`` runs, and those while ``idle`` runs."""
    step = _training()
    found: dict[int, list[list[float]]] = {inspecting.pid: [], idle.pid: []}
    for process in (inspecting, idle):
        process.suspend()
    for pair in range(pairs):
        for running in (inspecting, idle) if pair % 2 == 0 else (idle, inspecting):
            running.resume()
            found[running.pid].append(_block(step))
            running.suspend()
        medians = [median(blocks[-1:]) * 1e3 for blocks in found.values()]
        say(f"pair {pair + 1} of {pairs}: {medians[0]:.3f} ms with, {medians[1]:.3f} ms without")
    return found[inspecting.pid], found[idle.pid]


def _training() -> Callable[[], None]:
    """Return a function that makes a step of a small model on one core."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(SIZE, SIZE) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(64, SIZE)

    def step() -> None:
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def _block(step: Callable[[], None]) -> list[float]:
    times, ends = [], time.perf_counter() + BLOCK_S
    while (began := time.perf_counter()) < ends:
        step()
        times.append(time.perf_counter() - began)
    return times


if __name__ == "__main__":
    main()
