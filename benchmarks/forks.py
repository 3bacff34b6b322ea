"""Functions called in forked processes: fresh memory, a CPU clock of their own, and torch imported already."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any


class Forked:
    """A call in a forked process, which may talk to this one over ``pipe`` on the way.

    Args:
        do: Called with its end of the pipe first.
        args: And then these.
    """

    def __init__(self, do: Callable[..., Any], *args: Any) -> None:
        context = multiprocessing.get_context("fork")
        self.pipe: Connection
        self.pipe, its = context.Pipe()
        self._process = context.Process(target=_run, args=(do, self.pipe, its, args))
        self._process.start()
        its.close()

    def ask(self, message: Any = None) -> Any:
        """Send something and wait for the answer.

        Raises:
            RuntimeError: the process failed.
        """
        self.pipe.send(message)
        return self.result()

    def result(self) -> Any:
        """What it sends next: what it returns, at its end.

        Raises:
            RuntimeError: the process failed.
        """
        try:
            found, problem = self.pipe.recv()
        except EOFError:
            self._process.join()
            raise RuntimeError(f"a process of the benchmark died ({self._process.exitcode})") from None
        if problem:
            raise RuntimeError(problem)
        return found

    def close(self) -> None:
        """End the process."""
        self.pipe.close()
        self._process.join(5)
        self._process.kill()
        self._process.join()


def call(do: Callable[..., Any], *args: Any) -> Any:
    """Call in a forked process; its result.

    Raises:
        RuntimeError: it failed.
    """
    forked = Forked(_without_pipe, do, *args)
    try:
        return forked.result()
    finally:
        forked.close()


def answer(pipe: Connection, found: Any) -> None:
    """Answer what was asked, from within the forked process."""
    pipe.send((found, ""))


def _without_pipe(_: Connection, do: Callable[..., Any], *args: Any) -> Any:
    return do(*args)


def _run(do: Callable[..., Any], other: Connection, pipe: Connection, args: tuple[Any, ...]) -> None:
    other.close()
    try:
        found = (do(pipe, *args), "")
    except BaseException as error:
        found = (None, f"{type(error).__name__}: {error}")
    with contextlib.suppress(BrokenPipeError):  # nobody waits for it any more
        pipe.send(found)
