"""Pages of mapped memory, made present before a thread has to wait for them.

A page that is touched for the first time costs a fault, 1.3 µs on the machine
of docs/benchmarks/README.md; asked for in one call, many of them cost 0.3 µs each.
"""

from __future__ import annotations

import ctypes
import mmap

READ, WRITE = 22, 23
"""MADV_POPULATE_READ and MADV_POPULATE_WRITE, from Linux 5.14 on."""
STRIDE = 2 << 20
"""Bytes made present in one call: some hundred µs, so that the lock of the address space is not held long."""

_libc = ctypes.CDLL(None, use_errno=True)


def populate(address: int, length: int, how: int) -> bool:
    """Make pages present; other threads run meanwhile.

    Args:
        address: Anywhere in mapped memory; whole pages are taken.
        length: Bytes; what lies behind them on the last page is taken too.
        how: ``READ``, or ``WRITE`` for pages that are written to next. Neither changes what is in them.

    Returns:
        Whether it was done: a kernel that cannot leaves it to the faults.
    """
    start = address - address % mmap.PAGESIZE
    return not _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(address + length - start), how)
