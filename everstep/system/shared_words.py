"""Numbers in mapped memory that another process reads at any time.

``struct.pack_into`` sets the bytes to zero and then writes them one by one, so between 255 and 256 another process
reads 0 at times. A ``memoryview`` of 8-byte elements copies an element with a ``memcpy`` of constant size. It is relied
on that the compiler makes one move of it, as gcc and clang do, and that the processor carries out an aligned move of 8
bytes at once, as x86-64 and arm64 do. ``tests/everstep/system/test_shared_words.py`` checks it with two processes.
"""

from __future__ import annotations

import mmap


class SharedWords:
    """The words of 8 bytes at the multiples of 8 in a mapping; each is read and written at once.

    Args:
        mapped: The mapping. It can be closed only after ``release``.
    """

    def __init__(self, mapped: mmap.mmap) -> None:
        whole = memoryview(mapped)[: len(mapped) // 8 * 8]
        self._integers, self._floats = whole.cast("q"), whole.cast("d")

    def get(self, at: int) -> int:
        """The signed integer at an offset of bytes."""
        return self._integers[at >> 3]

    def set(self, at: int, value: int) -> None:
        """Store a signed integer at an offset of bytes."""
        self._integers[at >> 3] = value

    def get_float(self, at: int) -> float:
        """The number of type double at an offset of bytes."""
        return self._floats[at >> 3]

    def set_float(self, at: int, value: float) -> None:
        """Store a number of type double at an offset of bytes."""
        self._floats[at >> 3] = value

    def release(self) -> None:
        """Let go of the mapping."""
        self._integers.release()
        self._floats.release()
