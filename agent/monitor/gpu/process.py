"""The agent's end of the process that reads GPUs: asks, waits for so long, and ends a process that does not answer.

A process that waits in the driver may not die of SIGKILL. As long as it is there no second one is started: it would
wait for the same.
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
"""A process that was killed has this long to be gone."""
ERROR_BYTES = 2000
"""Longest part of its error output that is reported when it crashes."""
ANSWER_BYTES = 16 << 20
"""An answer that is longer is none (16 GPUs have some 100 KB)."""


class GpusSilent(Exception):
    """The process that reads GPUs did not answer in time.

    Args:
        text: What was waited for.
        stuck: It was killed and is still there: it waits in the kernel, and so in the driver.
    """

    def __init__(self, text: str, *, stuck: bool) -> None:
        super().__init__(text)
        self.stuck = stuck


class _Answer(BaseModel):
    """What the process says; a release beside this one may say more."""

    reading: GpusReading | None = None
    cannot: str = ""


class GpuProcess:
    """One process at a time, started when it is needed.

    Args:
        arguments: Of the module.
        command: Another program, for tests.
    """

    def __init__(self, arguments: Sequence[str] = (), command: Sequence[str] = ()) -> None:
        self._command = [*command] or [sys.executable, "-P", "-m", MODULE, "--parent", str(os.getpid()), *arguments]
        self._process: subprocess.Popen[bytes] | None = None
        self._errors = -1
        self._fresh = True
        """It has not answered yet."""
        self._killed = False

    @property
    def pid(self) -> int:
        """Id of the process; 0: there is none."""
        return self._process.pid if self._process else 0

    def read(self, answer_s: float, start_s: float) -> GpusReading:
        """All GPUs now.

        Args:
            answer_s: The process has this long to answer, seconds …
            start_s: … and this long the first time: it initialises the GPUs.

        Raises:
            GpusSilent: it did not answer, and was killed.
            CannotInspect: it ended, cannot be started, or says that it cannot.
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
            raise CannotInspect(f"{self._command[0]} answered something else: {error.errors()[0]['msg']}") from None
        if answer.reading is None:
            raise CannotInspect(answer.cannot or "the process that reads GPUs says neither what it read nor why not")
        return answer.reading

    def end(self) -> bool:
        """Kill the process, if there is one; whether it is gone. The next reading starts another."""
        process = self._process
        if process is None:
            return True
        self._killed = True
        with suppress(ProcessLookupError):
            process.kill()
        return self._is_gone(DIES_S)

    def close(self) -> None:
        """Kill the process and wait for nothing; from any thread."""
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
        """Its answer; None: it gave none in time.

        Raises:
            CannotInspect: it ended.
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
                raise CannotInspect(f"{self._command[0]} answers without end")
        return bytes(answer)

    def _ended(self) -> CannotInspect:
        """It ended by itself, of a crash in the library or the driver."""
        assert self._process
        said = os.pread(self._errors, ERROR_BYTES, max(os.fstat(self._errors).st_size - ERROR_BYTES, 0))
        self.end()
        last = said.decode(errors="replace").strip().rpartition("\n")[2]
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
        """Whether it waits in the kernel, for the evidence."""
        found = procfs.process_of(self.pid)
        return f"{self.pid} is in state {found.state}" if found else f"{self.pid} is gone"
