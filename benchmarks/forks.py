"""Calls functions in forked processes, which have new memory, a CPU clock of their own, and torch imported."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any


class Forked:
    """A call of a function in a forked process, which can answer questions while it runs.

    Args:
        do: The function. Its first argument is its end of the pipe.
        args: The function's further arguments.
    """

    def __init__(self, do: Callable[..., Any], *args: Any) -> None:
        context = multiprocessing.get_context("fork")
        self.pipe: Connection
        self.pipe, child_end = context.Pipe()
        self._process = context.Process(target=_run, args=(do, self.pipe, child_end, args))
        self._process.start()
        child_end.close()

    def ask(self, message: Any = None) -> Any:
        """Send a question, and wait for the answer.

        Raises:
            RuntimeError: the process failed.
        """
        self.pipe.send(message)
        return self.result()

    def result(self) -> Any:
        """Wait for the next answer, or for the function's result.

        Raises:
            RuntimeError: the process failed.
        """
        try:
            value, problem = self.pipe.recv()
        except EOFError:
            self._process.join()
            raise RuntimeError(f"a process of the benchmark died ({self._process.exitcode})") from None
        if problem:
            raise RuntimeError(problem)
        return value

    def close(self) -> None:
        """End the process."""
        self.pipe.close()
        self._process.join(5)
        self._process.kill()
        self._process.join()


def call(do: Callable[..., Any], *args: Any) -> Any:
    """Call a function in a forked process, and return its result.

    Raises:
        RuntimeError: the function or the process failed.
    """
    forked = Forked(_without_pipe, do, *args)
    try:
        return forked.result()
    finally:
        forked.close()


def answer(pipe: Connection, value: Any) -> None:
    """Answer a question of the parent; the forked process calls this."""
    pipe.send((value, ""))


def _without_pipe(_: Connection, do: Callable[..., Any], *args: Any) -> Any:
    return do(*args)


def _run(do: Callable[..., Any], parent_end: Connection, pipe: Connection, args: tuple[Any, ...]) -> None:
    parent_end.close()
    try:
        message = (do(pipe, *args), "")
    except BaseException as error:
        message = (None, f"{type(error).__name__}: {error}")
    with contextlib.suppress(BrokenPipeError):  # the parent does not wait any more
        pipe.send(message)
