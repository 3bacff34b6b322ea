"""Runs the site's own program that notifies people. The program gets the notice on its standard input, and has a time
limit."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator, Sequence

from everstep.errors import NoticeError

LAST_BYTES = 4096
"""The number of bytes that are kept from the end of the program's output."""
PIPE_BYTES = 1 << 16
"""The size of a pipe, bytes."""


async def run(command: Sequence[str], standard_input: bytes, deadline_s: float) -> str:
    """Run the program to its end; returns its result, e.g. ``exit code 0: sent``.

    Processes that the program leaves running, and their open files, are not awaited.

    Args:
        command: The program with its arguments.
        standard_input: The program's standard input.
        deadline_s: The program and its children are killed after this time, seconds.

    Raises:
        NoticeError: the program cannot run, did not end in time, or its exit code is not 0.
    """
    with _ProgramOutput() as output, _input(standard_input) as descriptor:
        try:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=descriptor, stdout=output.theirs, stderr=output.theirs, start_new_session=True
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
    result = f"{how}: {output.last_line[:200]}" if output.last_line else how
    if code:
        raise NoticeError(result)
    return result


@contextlib.contextmanager
def _input(contents: bytes) -> Iterator[int]:
    """Yield a file in memory with the contents. Unlike a pipe, it blocks nothing if the program does not read it."""
    file = os.memfd_create("notice")
    try:
        os.write(file, contents)
        os.lseek(file, 0, os.SEEK_SET)
        yield file
    finally:
        os.close(file)


class _ProgramOutput:
    """A pipe for the program's output. The pipes of asyncio are not used, because asyncio waits until no process has
    them open."""

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
        """Read the available output."""
        with contextlib.suppress(BlockingIOError):
            self._written = (self._written + os.read(self._ours, PIPE_BYTES))[-LAST_BYTES:]

    @property
    def last_line(self) -> str:
        """The last line of the output; empty: there is none."""
        return next(reversed(self._written.decode(errors="replace").strip().splitlines()), "")
