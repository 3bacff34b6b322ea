"""A thread ends another thread's wait for a file."""

from __future__ import annotations

import os
import threading

import pytest

from everstep.system.wake_up import WakeUp


@pytest.fixture
def silent() -> int:
    """A file descriptor that never becomes readable by itself."""
    return os.eventfd(0)


def test_a_ring_ends_one_wait_in_another_thread_or_the_next_one(silent: int) -> None:
    wake_up = WakeUp()
    waiting = threading.Thread(target=wake_up.wait, args=(silent, 600))
    waiting.start()
    wake_up.ring()
    waiting.join(60)
    assert not waiting.is_alive()

    wake_up.ring()
    assert not wake_up.wait(silent, 600)
    os.eventfd_write(silent, 1)
    assert wake_up.wait(silent, 600)


def test_after_a_close_a_ring_writes_nothing() -> None:
    wake_up = WakeUp()
    wake_up.close()
    others = os.eventfd(0, os.EFD_NONBLOCK)  # this descriptor has the number of the closed one

    wake_up.ring()
    wake_up.close()

    with pytest.raises(BlockingIOError):
        os.eventfd_read(others)


def test_a_close_waits_for_a_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    wake_up, write = WakeUp(), os.eventfd_write
    closing = threading.Thread(target=wake_up.close)

    def slow(file: int, value: int) -> None:
        closing.start()
        closing.join(0.2)
        write(file, value)

    monkeypatch.setattr(os, "eventfd_write", slow)
    wake_up.ring()
    closing.join(60)
    assert not closing.is_alive()
