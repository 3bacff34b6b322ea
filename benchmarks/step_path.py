"""Measures the cost of everstep on the path of a training step.

The first figure is the time of ``run.report``: while a reader polls the mapped file as an agent does, while that reader
is stopped, and after it was killed. A report must never block. The second figure is the throughput of a training loop
with reports, and of one with reports and a checkpoint after every step. Both are compared with the same loop without
everstep, and steps of all kinds take turns. The aim limits the CPU time of a step: the loop is one thread that never
waits, so on an idle core a step takes this time. The time by the wall clock is shown too.

    python -P -m benchmarks.step_path
    python -P -m benchmarks.step_path --quick --json
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

import everstep
from benchmarks.common import Row, Spread, quantile, say, show, show_json
from everstep.rank import environment
from everstep.rank.step_reports import ReportFile

REPORT_MEDIAN_AIM_US = 5.0
REPORT_P99_AIM_US = 50.0
THROUGHPUT_AIM = 0.99

READER = """
import sys, time
from pathlib import Path
from everstep.rank.step_reports import ReportFile
file, at = ReportFile.open(Path(sys.argv[1])), 0
print("reading", flush=True)
while True:
    file.snapshot()
    at, _ = file.records(at)
    time.sleep(0.01)
"""


def main() -> None:
    """Measure, print, and leave nothing behind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="take fewer samples")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="everstep-benchmark-"))
    try:
        rows = report_cost(folder, 5_000 if options.quick else 100_000)
        rows += throughput(folder, 12 if options.quick else 100)
    finally:
        shutil.rmtree(folder)
    if options.json:
        show_json("step_path", rows)
    else:
        show("step_path", rows)


def join(folder: Path, name: str, *, checkpoints: bool) -> everstep.Run:
    """Join a run as a rank under everstep does."""
    reports = ReportFile.create(folder / f"report-{name}", rank=0, generation=1)
    os.environ[environment.REPORT_FILE] = str(reports.path)
    os.environ[environment.TOPOLOGY] = "1,1,1,1,pp-dp-tp"
    os.environ.pop(environment.CHECKPOINT_FILE, None)
    if checkpoints:
        os.environ[environment.CHECKPOINT_FILE] = str(folder / f"checkpoint-{name}")
    return everstep.join()


@contextlib.contextmanager
def reader(path: Path, state: str) -> Iterator[None]:
    """Start a process that reads reports as an agent does. While the block runs, it is live, stopped or dead."""
    process = subprocess.Popen([sys.executable, "-c", READER, str(path)], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        if state != "live":
            process.send_signal(signal.SIGSTOP if state == "stopped" else signal.SIGKILL)
        yield
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def report_cost(folder: Path, count: int) -> list[Row]:
    """Measure the microseconds of one ``run.report``; return rows."""
    rows = []
    for state in ("live", "stopped", "dead"):
        say(f"reports with a {state} reader")
        run = join(folder, state, checkpoints=False)
        with reader(folder / f"report-{state}", state):
            samples = []
            for step in range(count + 100):
                began = time.perf_counter_ns()
                run.report(step, loss=2.5, grad_norm=0.5, tokens=4096)
                samples.append((time.perf_counter_ns() - began) / 1e3)
        del samples[:100]
        for label, share, aim in (
            ("median", 0.5, REPORT_MEDIAN_AIM_US),
            ("p90", 0.9, None),
            ("p99", 0.99, REPORT_P99_AIM_US),
            ("maximum", 1.0, None),
        ):
            rows.append(Row(f"report, {state} reader, {label}", "us", quantile(samples, share), None, aim, "ours"))
    return rows


class Training:
    """A small transformer and one step of it: 4,096 tokens on 0.8 million parameters."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True, norm_first=True)
        self.model = nn.Sequential(nn.Embedding(256, 128), nn.TransformerEncoder(layer, 4, enable_nested_tensor=False))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        self.text = torch.randint(256, (32, 128))

    def step(self) -> float:
        """Forward, backward, optimizer."""
        loss = self.model(self.text).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return float(loss.item())


def loop(run: everstep.Run, training: Training, *, checkpoints: bool) -> Iterator[None]:
    """Run a training loop under everstep, one step for each ``next``."""
    state = run.checkpoint(model=training.model, optimizer=training.optimizer) if checkpoints else None
    for step in run.steps(1 << 30, state):
        run.report(step, loss=training.step(), tokens=4096)
        yield


def plain(training: Training) -> Iterator[None]:
    """Run the loop without everstep, one step for each ``next``."""
    while True:
        training.step()
        yield


def throughput(folder: Path, rounds: int) -> list[Row]:
    """Measure steps with everstep and steps without; return rows that compare their times and their throughput."""
    kinds = {
        "without": plain(Training()),
        "with reports": loop(join(folder, "r", checkpoints=False), Training(), checkpoints=False),
        "with reports and checkpoints": loop(join(folder, "c", checkpoints=True), Training(), checkpoints=True),
    }
    wall: dict[str, list[float]] = {kind: [] for kind in kinds}
    cpu: dict[str, list[float]] = {kind: [] for kind in kinds}
    say("training steps")
    for index in range(rounds + 3):
        for kind in random.sample(list(kinds), len(kinds)):
            next(kinds[kind])  # this step warms the caches; the next step begins with the save of this one
            began, used = time.perf_counter_ns(), time.process_time_ns()
            next(kinds[kind])
            if index >= 3:
                wall[kind].append((time.perf_counter_ns() - began) / 1e6)
                cpu[kind].append((time.process_time_ns() - used) / 1e6)
    rows = []
    for kind in list(kinds)[1:]:
        for label in ("median", "p90", "maximum"):
            ours, peer = (getattr(Spread.of(wall[which]), label) for which in (kind, "without"))
            rows.append(Row(f"step {kind}, wall clock, {label}", "ms", ours, peer))
        ours, peer = (1e3 / Spread.of(cpu[which]).median for which in (kind, "without"))
        rows.append(Row(f"throughput {kind}, per CPU second", "steps/s", ours, peer, THROUGHPUT_AIM, larger=True))
    return rows


if __name__ == "__main__":
    main()
