"""This module sends requests to the process that reads GPUs, and kills the process if it does not answer in time.

It is the agent's side of ``agent/monitor/gpu/child.py``. A process that waits in the driver may survive SIGKILL. As
long as it exists, no second process is started, because the second process would hang too.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

from pydantic import BaseModel, ValidationError

from agent.monitor.gpu.reading import GpusReading
from everstep.errors import CannotInspect
from everstep.system import procfs

MODULE = "agent.monitor.gpu.child"
DIES_S = 1.0
"""Time in which a killed process has to disappear, seconds."""
ERROR_BYTES = 2000
"""Largest part of the error output of a crashed process that is read."""
ANSWER_BYTES = 16 << 20
"""Largest length of an answer (the answer for 16 GPUs has about 100 KB)."""


class GpusSilent(Exception):
    """The process that reads GPUs did not answer in time.

    Args:
        text: The message.
        stuck: Whether the process still exists after SIGKILL, which means that it waits in the driver.
    """

    def __init__(self, text: str, *, stuck: bool) -> None:
        super().__init__(text)
        self.stuck = stuck


class _Answer(BaseModel):
    """An answer of the process. Unknown fields from another release are ignored."""

    reading: GpusReading | None = None
    cannot: str = ""


class GpuProcess:
    """Starts the process that reads GPUs when it is needed, and reads through it.

    Args:
        arguments: Arguments of ``agent.monitor.gpu.child``.
        command: Another program that is started instead, for tests.
    """

    def __init__(self, arguments: Sequence[str] = (), command: Sequence[str] = ()) -> None:
        self._command = [*command] or [sys.executable, "-P", "-m", MODULE, "--parent", str(os.getpid()), *arguments]
        self._process: subprocess.Popen[bytes] | None = None
        self._errors = -1
        self._fresh = True
        """Whether the process has not answered yet."""
        self._killed = False

    @property
    def pid(self) -> int:
        """Pid of the process; 0: there is none."""
        return self._process.pid if self._process else 0

    def read(self, answer_s: float, start_s: float) -> GpusReading:
        """Read all GPUs.

        Args:
            answer_s: Longest wait for an answer, seconds.
            start_s: Longest wait for the first answer, which includes the initialisation of the GPUs, seconds.

        Raises:
            GpusSilent: the process did not answer and was killed.
            CannotInspect: the process cannot be started, has ended, or answered that it cannot read the GPUs.
        """
        if self._killed and not self._is_gone(0.0):
            raise GpusSilent(f"process {self.pid} still waits in the driver: {self._state()}", stuck=True)
        if self._process is None:
            self._start()
        patience_s = start_s if self._fresh else answer_s
        line = self._ask(time.monotonic() + patience_s)
        if line is None:
            state = self._state()
            stuck = not self.end()
            raise GpusSilent(f"no answer within {patience_s:g} s; process {state}", stuck=stuck)
        self._fresh = False
        try:
            answer = _Answer.model_validate_json(line)
        except ValidationError as error:
            self.end()
            raise CannotInspect(f"the answer of {self._command[0]} is wrong: {error.errors()[0]['msg']}") from None
        if answer.reading is None:
            raise CannotInspect(answer.cannot or "the process that reads GPUs answered neither a reading nor an error")
        return answer.reading

    def end(self) -> bool:
        """Kill the process, if there is one; returns whether it is gone. The next reading starts a new process."""
        process = self._process
        if process is None:
            return True
        self._killed = True
        with suppress(ProcessLookupError):
            process.kill()
        return self._is_gone(DIES_S)

    def close(self) -> None:
        """Kill the process without waiting; any thread may call this."""
        if process := self._process:
            with suppress(ProcessLookupError):
                process.kill()

    def _start(self) -> None:
        errors = os.memfd_create("errors of the GPU process")
        try:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, bufsize=0
            )
        except OSError as error:
            os.close(errors)
            raise CannotInspect(f"{self._command[0]} cannot be started: {error.strerror}") from error
        self._errors, self._fresh, self._killed = errors, True, False

    def _ask(self, until: float) -> bytes | None:
        """Send a request and return the answer; None: it did not arrive in time.

        Raises:
            CannotInspect: the process ended.
        """
        process = self._process
        assert process and process.stdin and process.stdout
        try:
            process.stdin.write(b"\n")
        except BrokenPipeError:
            raise self._ended() from None
        answer, descriptor, ready = bytearray(), process.stdout.fileno(), select.poll()
        ready.register(descriptor, select.POLLIN)
        while not answer.endswith(b"\n"):
            left_s = until - time.monotonic()
            if left_s <= 0 or not ready.poll(left_s * 1000):
                return None
            more = os.read(descriptor, 1 << 16)
            if not more:
                raise self._ended()
            answer += more
            if len(answer) > ANSWER_BYTES:
                self.end()
                raise CannotInspect(f"the answer of {self._command[0]} is too long")
        return bytes(answer)

    def _ended(self) -> CannotInspect:
        """Return the error for a process that ended by itself, e.g. by a crash in the library or the driver."""
        assert self._process
        errors = os.pread(self._errors, ERROR_BYTES, max(os.fstat(self._errors).st_size - ERROR_BYTES, 0))
        self.end()
        last = errors.decode(errors="replace").strip().rpartition("\n")[2]
        return CannotInspect(f"the process that reads GPUs ended{f': {last}' if last else ', and wrote nothing'}")

    def _is_gone(self, patience_s: float) -> bool:
        process = self._process
        if process is None:
            return True
        try:
            process.wait(patience_s)
        except subprocess.TimeoutExpired:
            return False
        for pipe in (process.stdin, process.stdout):
            if pipe:
                pipe.close()
        os.close(self._errors)
        self._process, self._errors, self._killed = None, -1, False
        return True

    def _state(self) -> str:
        """Describe the state of the process, which shows whether it waits in the kernel."""
        process = procfs.process_of(self.pid)
        return f"{self.pid} is in state {process.state}" if process else f"{self.pid} is gone"
