"""A word in shared memory by which the kernel tells that a process begins to end.

A parent, and a pidfd, hear of a process only once all its memory was given back: some ten milliseconds for a small
one, minutes for a rank with hundreds of GB. Before that the kernel goes through the *robust* mutexes that the ending
thread holds, marks each as left by its owner and wakes what waits for it. So a rank's main thread takes one in memory
that it shares with its agent, and never gives it back.

What is waited for is the mutex's first word, as futex(2) has it: the owner's thread id, and two bits. A waiting thread
only reads, so that an agent that is killed leaves nothing in the way of the next.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import platform
import threading

ROOM = 64
"""Bytes for a mutex of the C library: 40 on x86-64, 48 on arm64."""
OWNER_DIED, HAS_WAITERS, OWNER = 0x40000000, 0x80000000, 0x3FFFFFFF
"""Bits of the word: the owner ended; the kernel has to wake a thread; the owner's thread id."""
LOOK_S = 5
"""A waiting thread checks this often whether it still has to wait, seconds; an end wakes it at once."""

_PROCESS_SHARED, _ROBUST = 1, 1
_WAIT, _WAKE, _ALL = 0, 1, 1 << 30
_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine())
"""Number of the system call; None: on another kind of processor nothing is told early."""
_GO_ON = {errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT}
_libc = ctypes.CDLL(None, use_errno=True)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def hold(memory: mmap.mmap, at: int) -> bool:
    """Take the mutex at a place of shared memory that is all 0, in the main thread, until this process ends.

    Args:
        memory: It stays mapped from now on: the kernel looks there last.
        at: Where, a multiple of 8; ``ROOM`` bytes are used.

    Returns:
        False where this system cannot do it: the end is heard of once the process is gone.
    """
    word = _word(memory, at)
    address = ctypes.c_void_p(ctypes.addressof(word))
    attributes = ctypes.create_string_buffer(ROOM)
    failed = (
        _FUTEX is None
        or _libc.pthread_mutexattr_init(attributes)
        or _libc.pthread_mutexattr_setpshared(attributes, _PROCESS_SHARED)
        or _libc.pthread_mutexattr_setrobust(attributes, _ROBUST)
        or _libc.pthread_mutex_init(address, attributes)
        or _libc.pthread_mutex_lock(address)
    )
    if failed or word.value & OWNER != threading.get_native_id():
        return False
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))
    word.value |= HAS_WAITERS  # the kernel writes here only once this thread ends, and nothing else does
    _libc.syscall(_FUTEX, address, _WAKE, _ALL)  # threads that wait already, for a word that was 0
    return True


class EndNotice:
    """Waits for the end of the thread that owns such a mutex.

    Args:
        descriptor: An open file that has the word; it may be closed afterwards.
        at: Where.
    """

    def __init__(self, descriptor: int, at: int) -> None:
        self._memory = mmap.mmap(descriptor, 0)
        self._at = at
        self.dropped = False
        """Nothing waits for it any more."""

    def wait(self) -> bool:
        """Wait until the owner begins to end, then unmap the word; once, in a thread of its own.

        Returns:
            False where it was dropped, or this system cannot tell.
        """
        word = _word(self._memory, self._at)
        try:
            return _FUTEX is not None and self._wait(word)
        finally:
            del word
            self._memory.close()

    def _wait(self, word: ctypes.c_uint32) -> bool:
        address, patience = ctypes.c_void_p(ctypes.addressof(word)), ctypes.byref(_Timespec(LOOK_S, 0))
        while not self.dropped:
            now = word.value
            if now & OWNER_DIED:
                return True
            failed = _libc.syscall(_FUTEX, address, _WAIT, ctypes.c_uint32(now), patience)
            if failed and ctypes.get_errno() not in _GO_ON:
                return False
        return False


def _word(memory: mmap.mmap, at: int) -> ctypes.c_uint32:
    return ctypes.c_uint32.from_buffer(memory, at)
