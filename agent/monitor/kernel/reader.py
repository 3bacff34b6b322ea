"""Reads the kernel log record by record, as ``/dev/kmsg`` gives it.

One ``read`` is one record: ``priority,sequence,microseconds since boot,flags;text``, then lines that begin with a
space. A priority from 8 on was written by a process and not by the kernel (facility 1 and more).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from everstep.errors import CannotLook
from everstep.system.wake_up import WakeUp

RECORD_BYTES = 8192
"""The longest record that the kernel gives; a smaller buffer is refused."""
FIRST_USER_PRIORITY = 8


@dataclass(frozen=True, slots=True)
class KernelLine:
    """One record of the kernel log."""

    sequence: int
    time_ns: int
    """By the wall clock."""
    text: str
    from_user: bool
    """A process wrote it."""
    lost: int = 0
    """So many records before it were overwritten before they were read."""


class KernelLog:
    """The kernel log from a record on.

    Args:
        path: Of the device.
        after: Number of the last record that was read; -1: none was.
    """

    def __init__(self, path: Path, after: int = -1, now_ns: Callable[[], int] = time.time_ns) -> None:
        self._path = path
        self._now_ns = now_ns
        self.last = after
        """Number of the last record that was read."""
        self.missed = 0
        """Records that the kernel had overwritten before they were read."""
        self._file: int | None = None
        self._wake_up = WakeUp()

    def read(self, wait_s: float) -> Iterator[KernelLine]:
        """What is new; waits for it, where there is nothing.

        Raises:
            CannotLook: the log cannot be opened.
        """
        file = self._open()
        if not self._wake_up.wait(file, wait_s):
            return
        while True:
            try:
                record = os.read(file, RECORD_BYTES)
            except BlockingIOError:
                return
            except BrokenPipeError:  # overwritten meanwhile: the next read goes on with the oldest that is kept
                continue
            if not record:
                return
            line = self._parsed(record)
            if line and line.sequence > self.last:
                lost = line.sequence - self.last - 1 if self.last >= 0 else 0
                self.missed += lost
                self.last = line.sequence
                yield replace(line, lost=lost) if lost else line

    def hurry(self) -> None:
        """Let a thread that waits for a line, or would wait next, return."""
        self._wake_up.ring()

    def close(self) -> None:
        """Close the device, which is not read any more."""
        self._wake_up.close()
        if self._file is not None:
            os.close(self._file)
        self._file = None

    def _open(self) -> int:
        if self._file is None:
            try:
                self._file = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            except OSError as error:
                denied = isinstance(error, PermissionError)
                what_to_do = ": the agent needs CAP_SYSLOG, or sysctl kernel.dmesg_restrict=0" if denied else ""
                raise CannotLook(f"{self._path} cannot be read ({error.strerror}){what_to_do}") from error
        return self._file

    def _parsed(self, record: bytes) -> KernelLine | None:
        head, _, text = record.decode(errors="replace").partition(";")
        fields = head.split(",")
        try:
            priority, sequence, since_boot_us = int(fields[0]), int(fields[1]), int(fields[2])
        except (ValueError, IndexError):
            return None
        ago_ns = time.monotonic_ns() - since_boot_us * 1000
        first = text.splitlines()[0] if text else ""
        return KernelLine(sequence, self._now_ns() - max(ago_ns, 0), first, priority >= FIRST_USER_PRIORITY)
