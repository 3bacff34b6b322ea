"""What the monitor costs: CPU time of an agent with its inspections and of one without, and what a step notices.

Two real agents run side by side on this computer for some time, one with all inspections at their default periods, one
with none; their CPU time is read from /proc. Then a step of a small model is timed in turns, with each of them running
and the other one stopped (SIGSTOP).

    python -P benchmarks/monitor.py
    python -P benchmarks/monitor.py --quick --json
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from benchmarks.common import Row, finish, say, show, show_json

CORE_SHARE, STEP_RATIO = 0.01, 1.02
"""Aims: of one core, and of the median time of a step."""
STEPS, SIZE = 4000, 256
"""Of one turn: steps, some seconds, and the width of the matrices (ours)."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0, help="of CPU time (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=10, help="of steps, each way (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="20 seconds and 3 turns")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    seconds, turns = (20.0, 3) if options.quick else (options.seconds, options.turns)
    with (
        tempfile.TemporaryDirectory(prefix="everstep-bench-") as folder,
        agent(Path(folder) / "with", "") as inspecting,
        agent(Path(folder) / "without", "off = true") as idle,
    ):
        say("both agents are up")
        time.sleep(5)  # starting is not what is measured
        before = [_cpu_s(one) for one in (inspecting, idle)]
        time.sleep(seconds)
        shares = [(_cpu_s(one) - was) / seconds for one, was in zip((inspecting, idle), before, strict=True)]
        say(f"{shares[0]:.2%} and {shares[1]:.2%} of one core")
        beside, alone = _steps(inspecting, idle, turns)
    step_s, step_alone_s = statistics.median(beside), statistics.median(alone)
    rows = [
        Row("CPU of an agent with all inspections, of one core", "share", shares[0], shares[1]),
        Row("CPU of the inspections, of one core", "share", shares[0] - shares[1], None, CORE_SHARE, "ours"),
        Row("a training step beside it, median", "s", step_s, step_alone_s, STEP_RATIO),
    ]
    if options.json:
        show_json("monitor", rows, beside=beside, alone=alone)
    else:
        show("monitor", rows, ["The peer is the same agent without inspections."])
    finish([])


@contextmanager
def agent(folder: Path, settings: str) -> Iterator[psutil.Process]:
    """A real agent with these settings of its monitor, until the block ends."""
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


def _steps(inspecting: psutil.Process, idle: psutil.Process, turns: int) -> tuple[list[float], list[float]]:
    """Times of steps with one and with the other agent running, in turns."""
    found: tuple[list[float], list[float]] = ([], [])
    idle.suspend()
    for turn in range(2 * turns):
        running, times = (inspecting, found[0]) if turn % 2 == 0 else (idle, found[1])
        other = idle if running is inspecting else inspecting
        other.suspend()
        running.resume()
        times += _turn()
        say(f"turn {turn + 1} of {2 * turns}: {statistics.median(times) * 1e3:.2f} ms")
    inspecting.resume()
    idle.resume()
    return found


def _turn() -> list[float]:
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(SIZE, SIZE) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(64, SIZE)
    times = []
    for _ in range(STEPS):
        began = time.perf_counter()
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        times.append(time.perf_counter() - began)
    return times


if __name__ == "__main__":
    main()
