"""This module requests tests from the process that forks them, and kills tests that do not end in time.

It is the agent's side of ``agent/diagnoser/child.py``. Its calls block. One thread at a time may use it, but any thread
may call :meth:`DiagnosisProcess.end`.
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
"""Longest time to start the process and to import torch, seconds. The time limit of a test begins after that."""
DIES_S = 2.0
"""Time in which killed processes have to disappear, seconds."""
ERROR_BYTES = 2000
"""Largest part of the error output of the process that is read."""
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""Variables that prevent threads: a process with threads cannot be forked, and the number of threads changes bits."""


@dataclass(frozen=True, slots=True)
class DiagnosticRequest:
    """One test to run."""

    test: str
    settings: str
    """Settings that differ from the defaults, as JSON."""
    bench: Mapping[str, Any]
    """Fields of :class:`agent.diagnoser.diagnostic.Bench`."""
    within_s: float
    """The test is killed after this time, seconds."""


class DiagnosisProcess:
    """Starts the process when it is needed, and runs tests through it.

    Args:
        command: Another program that is started instead, for tests of this class.
    """

    def __init__(self, command: Sequence[str] = ()) -> None:
        self._command = [*command] or [sys.executable, "-P", "-m", MODULE]
        self._process: subprocess.Popen[bytes] | None = None
        self._mark = ""
        self._errors = -1
        self._ended = False

    @property
    def pid(self) -> int:
        """Pid of the process; 0: there is none."""
        return self._process.pid if self._process and not self._ended else 0

    def run(self, request: DiagnosticRequest, waits_at: Callable[[int], None]) -> DiagnosticResult:
        """Run a test to its end.

        Args:
            request: The test.
            waits_at: Called with the port at which the test waits for another machine.
        """
        if stuck := self._stuck():
            return _failed(request, UNABLE, f"process {stuck[0]} of an earlier test was killed and waits in the kernel")
        try:
            process = self._running()
        except OSError as error:
            return _failed(request, UNABLE, f"the process of the tests cannot be started: {error.strerror}")
        assert process.stdin
        line = {"test": request.test, "settings": request.settings, "bench": dict(request.bench)}
        with suppress(BrokenPipeError):
            process.stdin.write(json.dumps(line).encode() + b"\n")
        result: DiagnosticResult | None = None
        for answer in self._answers(process, request.within_s):
            if "waits_at" in answer:
                waits_at(answer["waits_at"])
            elif "result" in answer:
                result = DiagnosticResult.model_validate(answer["result"])
            elif "silent" in answer:
                self.end()
                return _failed(request, HANGS, f"it did not end within {request.within_s:g} s")
            elif "ended" in answer:
                return result or _failed(request, CRASHED, f"its process {_how(answer['ended'])}{self._last_words()}")
        words = self._last_words()
        self.end()
        return result or _failed(request, CRASHED, f"the process of the tests ended{words}")

    def end(self) -> None:
        """Kill the process and all processes that it started; the next test starts a new process."""
        if self._process is not None and not self._ended:
            self._ended = True
            kill_session(self._process.pid, self._variable)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(DIES_S)

    def close(self) -> None:
        """End the process and close its files. No test may be running."""
        self.end()
        self._discard()

    def _discard(self) -> None:
        """Close the files of an ended process."""
        if self._process is not None:
            self._process.poll()  # collects a process that took long to die
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe:
                    pipe.close()
            os.close(self._errors)
            self._process = None

    @property
    def _variable(self) -> str:
        return f"{VARIABLE}={self._mark}"

    def _stuck(self) -> list[int]:
        """Return the pids of processes that still exist although they were killed."""
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
        """Yield the messages of the process up to the end of the test.

        If the time is over, the last message is ``{"silent": …}``. If the process has ended, no more messages follow.
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
        errors = os.pread(self._errors, ERROR_BYTES, max(size - ERROR_BYTES, 0)).decode(errors="replace")
        last = errors.strip().rpartition("\n")[2]
        return f": {last}" if last else ""


def _how(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"


def _failed(request: DiagnosticRequest, reason: Reason, text: str) -> DiagnosticResult:
    return DiagnosticResult(test=request.test, findings=[reason.finding(request.test, text=f"{reason.means}: {text}")])
