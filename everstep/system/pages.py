"""Makes pages of mapped memory present before a thread has to wait for them.

The first access to a page costs a fault, 1.3 µs on the machine of docs/benchmarks/README.md. A call that makes many
pages present costs 0.3 µs for each page.
"""

from __future__ import annotations

import ctypes
import mmap

READ, WRITE = 22, 23
"""MADV_POPULATE_READ and MADV_POPULATE_WRITE, from Linux 5.14 on."""
STRIDE = 2 << 20
"""Bytes to make present in one call. A call lasts some hundred µs, so that the address space is not locked for long."""

_libc = ctypes.CDLL(None, use_errno=True)


def populate(address: int, length: int, how: int) -> bool:
    """Make all pages of a range present; other threads run meanwhile.

    Args:
        address: Beginning of the range, anywhere in mapped memory.
        length: Bytes of the range.
        how: ``READ``, or ``WRITE`` for pages that will be written to. Neither changes their contents.

    Returns:
        Whether it was done. A kernel that cannot do it makes each page present at its first access.
    """
    start = address - address % mmap.PAGESIZE
    return not _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(address + length - start), how)
