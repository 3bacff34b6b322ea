"""Notices that a process begins to end, before the kernel has freed its memory.

The parent of a process, or the owner of its pidfd, is notified only after the kernel has freed all its memory. That
takes some ten milliseconds for a small process, and minutes for a rank with hundreds of GB. Before it frees memory, the
kernel goes through the *robust* mutexes that the ending thread has locked, marks each as left by its owner and wakes
the threads that wait for it. So the main thread of a rank locks such a mutex, in memory that it shares with its agent,
and never unlocks it.

The agent waits for a change of the mutex's first word (futex(2)), which holds the thread id of the owner and two bits.
A waiting thread only reads, so an agent that is killed does not disturb the next agent.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import platform
import threading

ROOM = 64
"""Bytes that are reserved for a mutex of the C library, which has 40 on x86-64 and 48 on arm64."""
OWNER_DIED, HAS_WAITERS, OWNER = 0x40000000, 0x80000000, 0x3FFFFFFF
"""Bits of the word: the owner ended; the kernel has to wake a thread; the owner's thread id."""
CHECK_S = 5
"""A waiting thread checks this often whether it was dropped, seconds; the end of the owner wakes it at once."""

_PROCESS_SHARED, _ROBUST = 1, 1
_WAIT, _WAKE, _ALL = 0, 1, 1 << 30
_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine())
"""Number of the system call; None: this kind of processor is not supported."""
_WAIT_AGAIN = {errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT}
_libc = ctypes.CDLL(None, use_errno=True)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def arm(memory: mmap.mmap, at: int) -> bool:
    """Lock a mutex in shared memory until this process ends. The main thread has to call this.

    Args:
        memory: The shared memory. It stays mapped from now on, since the kernel reads the mutex when the process ends.
        at: Offset of the mutex, a multiple of 8; the ``ROOM`` bytes there must be 0.

    Returns:
        False if this system cannot do it. In that case the end is noticed only once the process is gone.
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
    word.value |= HAS_WAITERS  # no race: only this thread, and the kernel at its end, write to the word
    _libc.syscall(_FUTEX, address, _WAKE, _ALL)  # wakes threads that already wait for a word of 0
    return True


class EndNotice:
    """Waits for the end of the thread that locked a mutex with ``arm``.

    Args:
        descriptor: The open file of the shared memory; the caller may close it afterwards.
        at: Offset of the mutex.
    """

    def __init__(self, descriptor: int, at: int) -> None:
        self._memory = mmap.mmap(descriptor, 0)
        self._at = at
        self.dropped = False
        """Set by another thread to end the wait."""

    def wait(self) -> bool:
        """Wait until the owner begins to end, then unmap the memory. It is called once, in a thread of its own.

        Returns:
            False if the wait was dropped, or if this system does not support such mutexes.
        """
        word = _word(self._memory, self._at)
        try:
            return _FUTEX is not None and self._wait(word)
        finally:
            del word
            self._memory.close()

    def _wait(self, word: ctypes.c_uint32) -> bool:
        address, patience = ctypes.c_void_p(ctypes.addressof(word)), ctypes.byref(_Timespec(CHECK_S, 0))
        while not self.dropped:
            value = word.value
            if value & OWNER_DIED:
                return True
            failed = _libc.syscall(_FUTEX, address, _WAIT, ctypes.c_uint32(value), patience)
            if failed and ctypes.get_errno() not in _WAIT_AGAIN:
                return False
        return False


def _word(memory: mmap.mmap, at: int) -> ctypes.c_uint32:
    return ctypes.c_uint32.from_buffer(memory, at)
