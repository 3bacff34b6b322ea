"""The process that reads GPUs, so that a driver that hangs or crashes takes nothing else with it.

It answers each line that comes in with one line of JSON: ``{"reading": …}``, or ``{"cannot": why}``. It ends when there
is nobody to ask any more, and is killed by the kernel with the thread of the agent that started it, for in a call that
hangs it would not notice.
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
    """Answer until the agent is gone."""
    parser = argparse.ArgumentParser(prog="python -P -m agent.monitor.gpu.child", description=__doc__)
    parser.add_argument("--fake", type=Path, help="file that describes fake GPUs")
    parser.add_argument("--sys", type=Path, default=Path("/sys"))
    parser.add_argument("--proc", type=Path, default=PROC)
    parser.add_argument("--parent", type=int, default=0, help="process id of the agent")
    options = parser.parse_args()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if options.parent and os.getppid() != options.parent:
        return  # it ended before this process could ask to end with it
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
