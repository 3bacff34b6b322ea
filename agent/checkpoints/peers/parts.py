"""This module divides a payload into parts, which several connections carry at the same time.

A connection takes the next part when it has carried the one before, so a slow connection delays only its last part. The
receiver knows which bytes have arrived. After a cut, only the missing bytes are sent again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from agent.checkpoints.peers.wire import Wire
from everstep.errors import WireError
from everstep.slots.checksum import PayloadChecksum
from everstep.slots.format import SlotHeader

PART = 32 << 20
"""Largest size of a part, bytes."""
DIGESTED_AT_ONCE = 64 << 20
"""A connection digests at most this many bytes before it receives again, so that its other side does not wait long."""

Range = tuple[int, int]
"""The first byte, and the byte after the last one."""


def connections_for(size: int, most: int) -> int:
    """Return the number of connections that carry ``size`` bytes: one for each part, at most ``most``."""
    return max(1, min(most, -(-size // PART)))


class Parts:
    """The parts that still have to be carried; thread-safe.

    Args:
        missing: The missing ranges of the payload.
    """

    def __init__(self, missing: Sequence[Range]) -> None:
        self._lock = threading.Lock()
        self._missing = [(start, stop) for start, stop in reversed(missing) if start < stop]

    def take(self) -> Range | None:
        """Return the next part; None: no part is left."""
        with self._lock:
            if not self._missing:
                return None
            start, stop = self._missing.pop()
            if start + PART < stop:
                self._missing.append((start + PART, stop))
            return start, min(start + PART, stop)


class Incoming:
    """A payload that arrives, and its checksum so far; thread-safe.

    Args:
        header: Header of the slot.
        view: Memory of the payload.
    """

    def __init__(self, header: SlotHeader, view: memoryview) -> None:
        self.header = header
        self.view = view
        self._lock = threading.Lock()
        self._there: list[Range] = []
        """The ranges that have arrived, in order; they do not touch each other."""
        self._checksum = PayloadChecksum()
        self._digested = 0
        self._digesting = threading.Lock()

    def room(self, start: int, stop: int) -> memoryview:
        """Return the memory of a part.

        Raises:
            WireError: it is no part of the payload, or bytes of it have arrived already.
        """
        with self._lock:
            if not 0 <= start <= stop <= len(self.view):
                raise WireError(f"bytes {start} to {stop} of a payload of {len(self.view)} bytes")
            if any(first < stop and start < last for first, last in self._there):
                raise WireError(f"bytes {start} to {stop} of a payload are sent twice")
        return self.view[start:stop]

    def arrived(self, start: int, stop: int) -> None:
        """Record that bytes have arrived. Bytes are digested once all bytes before them have arrived too."""
        with self._lock:
            self._there = _merged([*self._there, (start, stop)])
        if self._digesting.acquire(blocking=False):
            try:
                self._digest_up_to(self._digested + DIGESTED_AT_ONCE)
            finally:
                self._digesting.release()

    def _digest_up_to(self, most: int) -> None:
        with self._lock:
            first, reached = self._there[0] if self._there else (0, 0)
        stop = min(most, reached)
        if first == 0 and stop > self._digested:
            with self.view[self._digested : stop] as fresh:
                self._checksum.update(fresh)
            self._digested = stop

    def missing(self) -> list[Range]:
        """Return the ranges that have not arrived, in order."""
        with self._lock:
            ends = [0, *(end for there in self._there for end in there), len(self.view)]
        return [(start, stop) for start, stop in zip(ends[::2], ends[1::2], strict=True) if start < stop]

    @property
    def done(self) -> int:
        """The number of bytes that have arrived."""
        with self._lock:
            return sum(stop - start for start, stop in self._there)

    def checksum(self) -> PayloadChecksum:
        """Return the checksum of the complete payload.

        Raises:
            WireError: bytes are missing.
        """
        if missing := self.missing():
            raise WireError(f"the payload ends without bytes {missing[0][0]} to {missing[0][1]}")
        with self._digesting:
            self._digest_up_to(len(self.view))
            return self._checksum


def _merged(ranges: Sequence[Range]) -> list[Range]:
    merged: list[Range] = []
    for start, stop in sorted(ranges):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(stop, merged[-1][1])
        else:
            merged.append((start, stop))
    return merged


def on_each(wires: Sequence[Wire], work: Callable[[Wire], None]) -> None:
    """Run ``work`` on all connections at the same time; the first error breaks all connections, and is raised."""
    errors: list[BaseException] = []

    def attempt(wire: Wire) -> None:
        try:
            work(wire)
        except BaseException as error:
            errors.append(error)
            for each in wires:
                each.cut()

    threads = [threading.Thread(target=attempt, args=(wire,), name="part of a slot", daemon=True) for wire in wires[1:]]
    for thread in threads:
        thread.start()
    attempt(wires[0])
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
