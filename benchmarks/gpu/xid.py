"""A process reads memory that its GPU does not have; what torch and the agent's inspection of the kernel log report.

    python -P -m benchmarks.gpu.xid          # makes the illegal access; the error ends only its own process

The driver writes such an access to the kernel log as Xid 31.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.checkpoint_saves import ROOT
from benchmarks.gpu.parts import Line

KERNEL_LOG = Path("/dev/kmsg")
NOWHERE = 1 << 46
"""An address at which a GPU has no memory."""
WAIT_S = 3.0
"""Time for which the inspection waits for a line of the log, seconds."""


def measure(*, gpu: bool) -> Iterator[Line]:
    """Yield the error of the process, and the findings about it."""
    inspection = None
    why = why_not()
    if not why:
        from agent.monitor.inspection import Site
        from agent.monitor.kernel.log import KernelLogInspection, KernelLogLimits

        inspection = KernelLogInspection(Site(), KernelLogLimits(interval_s=WAIT_S), {}, same_boot=False)
        inspection.inspect()
    began_ns = time.time_ns()
    command = [sys.executable, "-P", "-m", "benchmarks.gpu.xid"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    yield Line("the process", done.stdout.strip() or f"ended with exit code {done.returncode}")
    if inspection is None:
        yield Line("the kernel log", None, why=why)
        return
    found = inspection.inspect().findings
    findings = [finding for finding in found if max(finding.since_ns, finding.last_ns) >= began_ns]
    for finding in findings:
        yield Line(f"the kernel log, {finding.item}", finding.reason, why=finding.headline)
    if not findings:
        yield Line("the kernel log", "nothing new")


def why_not() -> str:
    """Return why the kernel log cannot be inspected; empty: it can."""
    if importlib.util.find_spec("pydantic") is None:
        return "the agent's inspection needs pydantic, which this Python does not have"
    try:
        os.close(os.open(KERNEL_LOG, os.O_RDONLY | os.O_NONBLOCK))
    except OSError as error:
        return f"it cannot be read: {error}"
    return ""


def access_nothing() -> str:
    """Let a kernel write to an address without memory; returns torch's error."""
    torch.ones(1, device="cuda")
    storage = torch._C._construct_storage_from_data_pointer(NOWHERE, torch.device("cuda", 0), 4096)
    try:
        torch.empty(0, dtype=torch.uint8, device="cuda").set_(storage).fill_(1)
        torch.cuda.synchronize()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return "no error"


if __name__ == "__main__":
    print(access_nothing(), flush=True)
    os._exit(0)  # the context is broken, so nothing is cleaned up
