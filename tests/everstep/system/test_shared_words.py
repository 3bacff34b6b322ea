"""A number in mapped memory is written and read at once, as another process sees it."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import struct
import time
from collections.abc import Callable

import pytest

from everstep.system.shared_words import SharedWords

AT = 64
LOW, HIGH = 255, 256
"""Neighbours without a common byte: a part of one with a part of the other is neither."""


def seen_beside(write: Callable[[int], object], read: Callable[[], int], seconds: float) -> set[int]:
    """Let another process write the two values in turn, and return what was read besides them in this time."""
    writer = os.fork()
    if writer == 0:
        while True:
            for _ in range(1000):
                write(LOW)
                write(HIGH)
    try:
        found: set[int] = set()
        values: set[int] = set()
        end = time.monotonic() + seconds
        while time.monotonic() < end and not found:
            values.update(read() for _ in range(5000))
            found = values - {LOW, HIGH}
    finally:
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)
    assert found or {LOW, HIGH} <= values, "both processes ran at the same time"
    return found


@pytest.fixture
def shared() -> mmap.mmap:
    """A page of memory that a child shares; 255 is stored in it."""
    mapped = mmap.mmap(-1, 4096)
    SharedWords(mapped).set(AT, LOW)
    return mapped


def test_another_process_never_reads_a_part_of_a_number(shared: mmap.mmap) -> None:
    words = SharedWords(shared)
    assert seen_beside(lambda value: words.set(AT, value), lambda: words.get(AT), 2) == set()


def test_the_store_alone_is_one_move(shared: mmap.mmap) -> None:
    """The reader loads 8 bytes at once in any case (ctypes), so a store in parts would be seen."""
    words, word = SharedWords(shared), ctypes.c_int64.from_buffer(shared, AT)
    assert seen_beside(lambda value: words.set(AT, value), lambda: word.value, 2) == set()


def test_a_part_of_a_number_is_read_if_struct_writes_it(shared: mmap.mmap) -> None:
    """So the tests above can fail, and would if a word were stored with ``struct.pack_into``."""
    words = SharedWords(shared)
    assert seen_beside(lambda value: struct.pack_into("<q", shared, AT, value), lambda: words.get(AT), 60)


def test_words_keep_integers_and_floats() -> None:
    with mmap.mmap(-1, 100) as mapped:
        words = SharedWords(mapped)
        words.set(0, -1)
        words.set_float(88, 0.1)
        assert (words.get(0), words.get_float(88), words.get(8)) == (-1, 0.1, 0)
        assert mapped[:8] == b"\xff" * 8
        with pytest.raises(IndexError):
            words.get(96)
        words.release()
