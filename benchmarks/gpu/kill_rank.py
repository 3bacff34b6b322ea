"""Kills the rank of a real job on a GPU, on a local cluster with Temporal (``everstep drill kill-rank``)."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator

from benchmarks.checkpoint_saves import ROOT
from benchmarks.gpu.parts import Line

COMMAND = ("-P", "-m", "console.main", "drill", "kill-rank", "--machines", "1", "--ranks-per-machine", "1", "--json")


def measure(*, gpu: bool) -> Iterator[Line]:
    """Yield the times of the recovery, and whether losses and last state are those of the run without the fault.

    Raises:
        RuntimeError: the drill did not run.
    """
    command = [sys.executable, *COMMAND]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            output, errors = process.communicate()
        finally:
            process.send_signal(signal.SIGINT)  # if the time limit was reached: the drill removes its cluster
    if not output.strip():
        raise RuntimeError((errors.strip().splitlines() or ["the drill printed nothing"])[-1])
    found = json.loads(output)
    result = found[0] if isinstance(found, list) else found
    yield Line("reported after", result["detected_s"], "s")
    yield Line("stepping again after", result["recovered_s"], "s")
    yield Line("the first step of the rank", result["step_s"], "s")
    for name, key in (("losses are equal", "losses_match"), ("the last state is equal", "state_match")):
        yield Line(name, {True: "yes", False: "NO", None: None}[result[key]])
