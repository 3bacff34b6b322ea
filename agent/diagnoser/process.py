"""The agent's side of the process from which tests are forked: requests a test, awaits its result, kills late tests.

The methods block, and only one thread at a time may call them; any thread may call :meth:`DiagnosisProcess.end`.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from agent.diagnoser.child import VARIABLE
from agent.diagnoser.diagnostic import CRASHED, HANGS, UNABLE
from agent.launcher.processes import family_of, kill_session
from everstep.model.diagnosis import DiagnosticResult
from everstep.model.finding import Reason

MODULE = "agent.diagnoser.child"
START_S = 60.0
"""The time limit for the start and the imports, seconds; the time limit of a test begins after that."""
DIES_S = 2.0
"""Processes that were killed have this long to be gone, seconds."""
ERROR_BYTES = 2000
"""The last line of the error output is taken from this many bytes at its end."""
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""Numerical libraries start no threads: a process with such threads cannot be forked, and the bits of results depend on
their number."""


@dataclass(frozen=True, slots=True)
class DiagnosticRequest:
    """One test to run."""

    test: str
    settings: str
    """As JSON."""
    bench: Mapping[str, Any]
    """Fields of :class:`agent.diagnoser.diagnostic.Bench`."""
    within_s: float
    """The test is killed after this time, seconds."""


class DiagnosisProcess:
    """One process at a time, started when it is needed.

    Args:
        command: Another program than ``MODULE``, for unit tests of this class.
    """

    def __init__(self, command: Sequence[str] = ()) -> None:
        self._command = [*command] or [sys.executable, "-P", "-m", MODULE]
        self._process: subprocess.Popen[bytes] | None = None
        self._mark = ""
        self._errors = -1
        self._ended = False

    @property
    def pid(self) -> int:
        """Id of the process; 0: there is none."""
        return self._process.pid if self._process and not self._ended else 0

    def run(self, request: DiagnosticRequest, waits_at: Callable[[int], None]) -> DiagnosticResult:
        """Run a test to its end.

        Args:
            request: The test to run.
            waits_at: Called with the port at which the test waits for another machine.
        """
        if stuck := self._stuck():
            return _told(request, UNABLE, f"process {stuck[0]} of an earlier test was killed and waits in the kernel")
        try:
            process = self._running()
        except OSError as error:
            return _told(request, UNABLE, f"the process of the tests cannot be started: {error.strerror}")
        assert process.stdin
        asked = {"test": request.test, "settings": request.settings, "bench": dict(request.bench)}
        with suppress(BrokenPipeError):
            process.stdin.write(json.dumps(asked).encode() + b"\n")
        result: DiagnosticResult | None = None
        for answer in self._answers(process, request.within_s):
            if "waits_at" in answer:
                waits_at(answer["waits_at"])
            elif "result" in answer:
                result = DiagnosticResult.model_validate(answer["result"])
            elif "silent" in answer:
                self.end()
                return _told(request, HANGS, f"it did not end within {request.within_s:g} s")
            elif "ended" in answer:
                return result or _told(request, CRASHED, f"its process {_how(answer['ended'])}{self._last_words()}")
        words = self._last_words()
        self.end()
        return result or _told(request, CRASHED, f"the process of the tests ended{words}")

    def end(self) -> None:
        """Kill the process with all that it started, if there is one; the next test starts another."""
        if self._process is not None and not self._ended:
            self._ended = True
            kill_session(self._process.pid, self._variable)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(DIES_S)

    def close(self) -> None:
        """End the process and close its files. It must not be called while a test runs."""
        self.end()
        self._discard()

    def _discard(self) -> None:
        """Close the files of a process that was ended."""
        if self._process is not None:
            self._process.poll()  # reap it, if it was not dead yet when it was ended
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe:
                    pipe.close()
            os.close(self._errors)
            self._process = None

    @property
    def _variable(self) -> str:
        return f"{VARIABLE}={self._mark}"

    def _stuck(self) -> list[int]:
        """Processes that were killed and are still there."""
        process = self._process
        if process is None or not self._ended:
            return []
        ends = time.monotonic() + DIES_S
        while (left := family_of(process.pid, self._variable)) and time.monotonic() < ends:
            time.sleep(0.02)
        return left

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and not self._ended:
            return self._process
        self._discard()
        self._mark, self._errors = uuid.uuid4().hex, os.memfd_create("errors of the tests")
        try:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                bufsize=0,
                start_new_session=True,
                env=os.environ | ONE_THREAD | {VARIABLE: self._mark},
            )
        except OSError:
            os.close(self._errors)
            raise
        self._ended = False
        return self._process

    def _answers(self, process: subprocess.Popen[bytes], within_s: float) -> Iterator[dict[str, Any]]:
        """Yield the messages of the process, up to the end of the test.

        When the time is over, ``{"silent": True}`` is the last message. When the process is gone, no message follows.
        """
        assert process.stdout
        unread, descriptor, poll = b"", process.stdout.fileno(), select.poll()
        poll.register(descriptor, select.POLLIN)
        until = time.monotonic() + START_S
        while True:
            left_s = until - time.monotonic()
            if left_s <= 0 or not poll.poll(left_s * 1000):
                yield {"silent": True}
                return
            more = os.read(descriptor, 1 << 16)
            if not more:
                return
            unread += more
            while b"\n" in unread:
                line, _, unread = unread.partition(b"\n")
                answer = json.loads(line)
                if "begun" in answer:
                    until = time.monotonic() + within_s
                yield answer
                if "ended" in answer:
                    return

    def _last_words(self) -> str:
        size = os.fstat(self._errors).st_size
        said = os.pread(self._errors, ERROR_BYTES, max(size - ERROR_BYTES, 0)).decode(errors="replace")
        last = said.strip().rpartition("\n")[2]
        return f": {last}" if last else ""


def _how(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"


def _told(request: DiagnosticRequest, reason: Reason, text: str) -> DiagnosticResult:
    return DiagnosticResult(test=request.test, findings=[reason.finding(request.test, text=f"{reason.means}: {text}")])
