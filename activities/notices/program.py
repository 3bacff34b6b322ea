"""Runs a program of the site's that tells somebody: the notice on its standard input, a deadline, its end as answer."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator, Sequence

from everstep.errors import NoticeError

LAST_BYTES = 4096
"""Of what it writes the end is kept."""
PIPE_BYTES = 1 << 16
"""As much as a pipe holds."""


async def run(command: Sequence[str], given: bytes, deadline_s: float) -> str:
    """Run it to its end; returns what came back, e.g. ``exit code 0: sent``.

    What it leaves running, and what that has open, is not waited for.

    Args:
        command: The program with its arguments.
        given: Its standard input.
        deadline_s: After it the program is killed with all that it started, seconds.

    Raises:
        NoticeError: it cannot be run, did not end in time, or ended with another exit code than 0.
    """
    with _ProgramOutput() as output, _input(given) as standard_input:
        try:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=standard_input, stdout=output.theirs, stderr=output.theirs, start_new_session=True
            )
        except OSError as error:
            raise NoticeError(f"{command[0]} cannot be run: {error.strerror}") from None
        try:
            async with asyncio.timeout(deadline_s):
                code = await process.wait()
        except TimeoutError:
            raise NoticeError(f"{command[0]} did not end within {deadline_s:g} s") from None
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        output.read()
    how = f"exit code {code}" if code >= 0 else f"signal {-code}"
    said = f"{how}: {output.last_line[:200]}" if output.last_line else how
    if code:
        raise NoticeError(said)
    return said


@contextlib.contextmanager
def _input(given: bytes) -> Iterator[int]:
    """A file in memory, so that nobody waits for a program that does not read."""
    file = os.memfd_create("notice")
    try:
        os.write(file, given)
        os.lseek(file, 0, os.SEEK_SET)
        yield file
    finally:
        os.close(file)


class _ProgramOutput:
    """A pipe of our own: asyncio's is waited for as long as anybody has it open."""

    def __enter__(self) -> _ProgramOutput:
        self._ours, self.theirs = os.pipe()
        os.set_blocking(self._ours, False)
        self._written = b""
        asyncio.get_running_loop().add_reader(self._ours, self.read)
        return self

    def __exit__(self, *error: object) -> None:
        asyncio.get_running_loop().remove_reader(self._ours)
        os.close(self._ours)
        os.close(self.theirs)

    def read(self) -> None:
        """Take what is there."""
        with contextlib.suppress(BlockingIOError):
            self._written = (self._written + os.read(self._ours, PIPE_BYTES))[-LAST_BYTES:]

    @property
    def last_line(self) -> str:
        """Of all that was written; empty: nothing was."""
        return next(reversed(self._written.decode(errors="replace").strip().splitlines()), "")
