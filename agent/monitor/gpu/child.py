"""The process that reads GPUs, so that a driver that hangs or crashes does not stop the agent.

It answers each input line with one line of JSON: ``{"reading": …}``, or ``{"cannot": why}``. It ends when its input is
closed. While a call hangs, the process cannot notice this, so the kernel also kills it when the agent's thread
ends.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import sys
from pathlib import Path

from agent.monitor.gpu import reading
from everstep.errors import EverstepError
from everstep.system.procfs import PROC

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Answer requests until the agent has ended."""
    parser = argparse.ArgumentParser(prog="python -P -m agent.monitor.gpu.child", description=__doc__)
    parser.add_argument("--fake", type=Path, help="file that describes simulated GPUs")
    parser.add_argument("--sys", type=Path, default=Path("/sys"))
    parser.add_argument("--proc", type=Path, default=PROC)
    parser.add_argument("--parent", type=int, default=0, help="process id of the agent")
    options = parser.parse_args()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if options.parent and os.getppid() != options.parent:
        return  # the agent ended before prctl was called
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    reader = _reader(options)
    for _ in sys.stdin:
        try:
            answer = f'{{"reading": {reading.to_json(reader.read())}}}'
        except EverstepError as error:
            answer = json.dumps({"cannot": str(error)})
        print(answer, flush=True)


def _reader(options: argparse.Namespace) -> reading.GpuReader:
    if options.fake:
        from agent.monitor.gpu.fake import FakeReader

        return FakeReader(options.fake)
    from agent.monitor.gpu.nvml import NvmlReader

    return NvmlReader(options.sys, options.proc)


if __name__ == "__main__":
    main()
