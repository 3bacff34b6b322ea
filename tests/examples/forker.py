"""Forks ranks of a script from a process with the imports of a fork server, so a test needs these imports only once.

It reads launches as JSON lines ``{"script": …, "args": […], "environments": [{…}, …]}`` from stdin. It answers with a
line of pids, and when all ranks have ended, with a line of exit codes. If a rank fails, the others are killed.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
import traceback
from typing import Any, NoReturn

from agent.launcher import fork_server


def rank(launch: dict[str, Any], environment: dict[str, str]) -> NoReturn:
    import torch  # fork_server.preload() has imported it, with one thread

    code = 1
    try:
        os.environ.update(environment)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        sys.argv[:] = [launch["script"], *launch["args"]]
        torch.default_generator.seed()
        runpy.run_path(launch["script"], run_name="__main__")
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def main() -> None:
    fork_server.preload()
    for line in sys.stdin:
        launch = json.loads(line)
        pids = []
        for environment in launch["environments"]:
            pid = os.fork()
            if pid == 0:
                rank(launch, environment)
            pids.append(pid)
        print(json.dumps(pids), flush=True)
        codes: dict[int, int] = {}
        while len(codes) < len(pids):
            pid, status = os.wait()
            codes[pid] = os.waitstatus_to_exitcode(status)
            if codes[pid]:
                for other in set(pids) - codes.keys():
                    os.kill(other, signal.SIGKILL)
        print(json.dumps([codes[pid] for pid in pids]), flush=True)


if __name__ == "__main__":
    main()
