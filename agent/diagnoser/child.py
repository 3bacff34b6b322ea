"""This program forks a process for each test, so that imports are loaded only once and a test leaves nothing behind.

Each input line is a test to run: ``{"test": …, "settings": …, "bench": …}``. The program answers with lines of JSON:
``{"begun": pid}``, ``{"waits_at": port}`` from a test that waits for another machine, ``{"result": …}``, and
``{"ended": status}`` when the test's process has ended. When its input is closed, the program ends, and with it all
processes that it started.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import select
import signal
import time
from pathlib import Path
from typing import Any

from agent.diagnoser.all import kind_named, limits_named
from agent.diagnoser.diagnostic import UNABLE, Bench, Peer
from agent.launcher.processes import kill_session
from everstep.errors import CannotInspect
from everstep.model.diagnosis import DiagnosticResult
from everstep.system import procfs

PR_SET_PDEATHSIG = 1
VARIABLE = "EVERSTEP_DIAGNOSIS"
"""Environment variable with a different value for each such process; it marks the processes that it starts."""
REQUEST_BYTES = 1 << 16


class ForkingTester:
    """Runs tests in sequence.

    Args:
        requests: Descriptor of the requests.
        answers: Descriptor of the answers.
    """

    def __init__(self, requests: int, answers: int) -> None:
        self._requests, self._answers = requests, answers
        self._unread = b""

    def serve(self) -> None:
        """Run tests until the agent has ended."""
        while (line := self._next()) is not None:
            self._carry_out(json.loads(line))

    def _next(self) -> bytes | None:
        while b"\n" not in self._unread:
            more = os.read(self._requests, REQUEST_BYTES)
            if not more:
                return None
            self._unread += more
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _carry_out(self, request: dict[str, Any]) -> None:
        gc.disable()  # imports produce little garbage, and collecting it would take a quarter of the time
        for module in kind_named(request["test"]).imports:
            importlib.import_module(module)
        gc.collect()
        gc.freeze()
        gc.enable()
        pid = os.fork()
        if pid == 0:
            self._test(request)
        self._say({"begun": pid})
        ended, poll = os.pidfd_open(pid), select.poll()
        poll.register(ended, select.POLLIN)
        poll.register(self._requests, select.POLLIN)
        while ended not in dict(poll.poll()):
            more = os.read(self._requests, REQUEST_BYTES)
            if not more:  # the agent has ended
                end_all()
            self._unread += more
        os.close(ended)
        self._say({"ended": os.waitpid(pid, 0)[1]})

    def _test(self, request: dict[str, Any]) -> None:
        """Run a test in its own process."""
        try:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            os.close(self._requests)
            self._say({"result": self._run(request).model_dump(mode="json")})
        finally:
            os._exit(0)

    def _run(self, request: dict[str, Any]) -> DiagnosticResult:
        name, began = request["test"], time.monotonic()
        peer = request["bench"].pop("peer")
        bench = Bench(
            **request["bench"] | {"folder": Path(request["bench"]["folder"])},
            peer=Peer(**peer) if peer else None,
            waits_at=lambda port: self._say({"waits_at": port}),
        )
        test = kind_named(name)(bench, limits_named(name, request["settings"]))
        try:
            result = test.run()
        except (CannotInspect, OSError, ImportError) as error:
            result = test.result(test.finding(UNABLE, text=f"{UNABLE.means}: {error}"))
        return result.model_copy(update={"seconds": time.monotonic() - began})

    def _say(self, answer: dict[str, Any]) -> None:
        data = json.dumps(answer).encode() + b"\n"
        while data:
            data = data[os.write(self._answers, data) :]


def end_all() -> None:
    """End this process and all processes that it started."""
    kill_session(os.getsid(0), f"{VARIABLE}={os.environ.get(VARIABLE, '')}")
    os._exit(1)


def main() -> None:
    """Serve on standard input and output; the output of the tests goes to standard error."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    procfs.give_up_oom_protection()  # tests use much memory, and the agent must not be killed for it
    answers = os.dup(1)
    os.dup2(2, 1)
    ForkingTester(0, answers).serve()


if __name__ == "__main__":
    main()
