"""Network interfaces as the kernel lists them by rtnetlink: those of this thread's network namespace.

/sys/class/net may be of another namespace than the process; a netlink socket never is. Formats: rtnetlink(7), and the
kernel's ``if_link.h`` and ``if_addr.h``.
"""

from __future__ import annotations

import ipaddress
import os
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from everstep.errors import CannotInspect
from everstep.system.wake_up import WakeUp

ANSWER_S = 5.0
"""The kernel has this long to answer."""
TRIES = 3
"""A list that changed while it was read is read again so often."""
BUFFER_BYTES = 1 << 18

_HEADER = struct.Struct("=IHHII")
_LINK = struct.Struct("=BxHiII")
_ADDRESS = struct.Struct("=BBBBI")
_ATTRIBUTE = struct.Struct("=HH")
_ERROR, _DONE = 2, 3
_NEW_LINK, _DELETED_LINK, _GET_LINK, _NEW_ADDRESS, _GET_ADDRESS = 16, 17, 18, 20, 22
_REQUEST, _DUMP, _INTERRUPTED = 0x1, 0x300, 0x10
_GROUP_LINK = 0x1
_FLAG_UP, _FLAG_LOOPBACK, _FLAG_LOWER_UP = 0x1, 0x8, 0x10000
_TYPE_MASK = 0x3FFF
_NAME, _LINK_INFO, _STATISTICS, _CHANGES, _DOWNS = 3, 18, 23, 35, 48
_INFO_KIND = 1
_ADDRESS_OF_PEER, _ADDRESS_LOCAL = 1, 2
STATISTICS = (
    *("rx_packets", "tx_packets", "rx_bytes", "tx_bytes", "rx_errors", "tx_errors", "rx_dropped", "tx_dropped"),
    *("multicast", "collisions", "rx_length_errors", "rx_over_errors", "rx_crc_errors", "rx_frame_errors"),
    *("rx_fifo_errors", "rx_missed_errors", "tx_aborted_errors", "tx_carrier_errors"),
)
"""The first counters of ``rtnl_link_stats64``, in the kernel's order."""


@dataclass(frozen=True, slots=True)
class Link:
    """A network interface."""

    index: int
    """Another one where an interface of the same name was made anew."""
    name: str
    kind: str = ""
    """Kind of a virtual interface, e.g. ``veth``; empty: hardware is behind it."""
    loopback: bool = False
    switched_on: bool = True
    """By an administrator."""
    carrier: bool = True
    """It is switched on, and there is a link; the kernel's operational state lags behind ``downs``, this does not."""
    downs: int = 0
    """How often it lost its carrier since it was made."""
    statistics: dict[str, int] = field(default_factory=dict)
    """Counters since it was made: ``STATISTICS``."""


def links() -> dict[str, Link]:
    """Return all interfaces by name.

    Raises:
        CannotInspect: the kernel does not answer.
    """
    messages = _listed(_GET_LINK, _LINK.pack(socket.AF_UNSPEC, 0, 0, 0, 0))
    found = [link_of(body) for kind, body in messages if kind == _NEW_LINK]
    return {link.name: link for link in found}


def addresses() -> dict[str, int]:
    """Return address → index of the interface that has it.

    Raises:
        CannotInspect: the kernel does not answer.
    """
    found = {}
    for kind, body in _listed(_GET_ADDRESS, _ADDRESS.pack(socket.AF_UNSPEC, 0, 0, 0, 0)):
        if kind != _NEW_ADDRESS:
            continue
        index = _ADDRESS.unpack_from(body)[4]
        attributes = dict(attributes_of(body[_ADDRESS.size :]))
        packed = attributes.get(_ADDRESS_LOCAL) or attributes.get(_ADDRESS_OF_PEER, b"")
        if len(packed) in (4, 16):
            found[str(ipaddress.ip_address(packed))] = index
    return found


class LinkChanges:
    """Waits until an interface changes. Opened in the thread that waits, whose network namespace counts."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self._wake_up = WakeUp()
        self._turn = threading.Lock()
        self._ended = False

    def open(self) -> None:
        """Hear what changes from now on; what is asked afterwards misses nothing.

        Raises:
            CannotInspect: the kernel gives no such socket.
        """
        if self._socket is None and not self._ended:
            self._socket = _socket(_GROUP_LINK)

    def wait(self, indexes: set[int], wait_s: float) -> bool:
        """Wait until one of these interfaces changes.

        Args:
            indexes: Theirs; changes of other interfaces do not count.
            wait_s: Seconds at most.

        Returns:
            Whether one changed, or some change was not heard.

        Raises:
            CannotInspect: ``open`` failed.
        """
        with self._turn:
            try:
                return self._wait(indexes, wait_s)
            finally:
                if self._ended:
                    self._close()

    def hurry(self) -> None:
        """Let a thread that waits, or would wait next, return; nothing changed."""
        self._wake_up.ring()

    def close(self) -> None:
        """Wait no more; a thread that waits returns, and closes what it waited for."""
        self._ended = True
        self._wake_up.ring()
        if self._turn.acquire(timeout=0.1):
            self._close()
            self._turn.release()

    def _close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self._wake_up.close()

    def _wait(self, indexes: set[int], wait_s: float) -> bool:
        self.open()
        until = time.monotonic() + wait_s
        while self._socket is not None and not self._ended:
            if not self._wake_up.wait(self._socket.fileno(), until - time.monotonic()):
                return False
            try:
                heard = self._socket.recv(BUFFER_BYTES)
            except BlockingIOError:
                continue
            except OSError:  # ENOBUFS: more changed than the kernel kept for us
                return True
            if any(
                _LINK.unpack_from(body)[2] in indexes
                for kind, _, body in messages_of(heard)
                if kind in (_NEW_LINK, _DELETED_LINK)
            ):
                return True
        return False


def link_of(body: bytes) -> Link:
    """The interface of an ``RTM_NEWLINK`` message, given without the netlink header."""
    _, _, index, flags, _ = _LINK.unpack_from(body)
    attributes = dict(attributes_of(body[_LINK.size :]))
    info = dict(attributes_of(attributes.get(_LINK_INFO, b"")))
    counters = attributes.get(_STATISTICS, b"")
    known = min(len(counters) // 8, len(STATISTICS))
    # A kernel before 4.16 has no counter of downs, only of changes: each down is one of two.
    downs = _number(attributes[_DOWNS]) if _DOWNS in attributes else _number(attributes.get(_CHANGES, b"")) // 2
    return Link(
        index=index,
        name=_text(attributes.get(_NAME, b"")),
        kind=_text(info.get(_INFO_KIND, b"")),
        loopback=bool(flags & _FLAG_LOOPBACK),
        switched_on=bool(flags & _FLAG_UP),
        carrier=bool(flags & _FLAG_UP and flags & _FLAG_LOWER_UP),
        downs=downs,
        statistics=dict(zip(STATISTICS, struct.unpack_from(f"={known}Q", counters), strict=False)),
    )


def messages_of(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """The netlink messages of a datagram: type, flags, and what follows the header. A cut one ends it."""
    at = 0
    while at + _HEADER.size <= len(data):
        length, kind, flags, _, _ = _HEADER.unpack_from(data, at)
        if not _HEADER.size <= length <= len(data) - at:
            return
        yield kind, flags, data[at + _HEADER.size : at + length]
        at += (length + 3) & ~3


def attributes_of(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Type and value of each attribute. A cut one ends it."""
    at = 0
    while at + _ATTRIBUTE.size <= len(data):
        length, kind = _ATTRIBUTE.unpack_from(data, at)
        if not _ATTRIBUTE.size <= length <= len(data) - at:
            return
        yield kind & _TYPE_MASK, data[at + _ATTRIBUTE.size : at + length]
        at += (length + 3) & ~3


def _socket(groups: int = 0) -> socket.socket:
    try:
        opened = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE)
    except OSError as error:
        raise CannotInspect(f"the kernel gives no netlink socket: {error.strerror}") from error
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        opened.bind((0, groups))
        opened.setblocking(False)
    except OSError as error:
        opened.close()
        raise CannotInspect(f"the netlink socket cannot be used: {error.strerror}") from error
    return opened


def _listed(kind: int, body: bytes) -> list[tuple[int, bytes]]:
    """All messages of one list."""
    with _socket() as opened:
        for number in range(1, TRIES + 1):
            header = _HEADER.pack(_HEADER.size + len(body), kind, _REQUEST | _DUMP, number, 0)
            opened.send(header + body)
            found, whole = _answer(opened)
            if whole:
                return found
    raise CannotInspect(f"the network interfaces changed {TRIES} times while they were listed")


def _answer(opened: socket.socket) -> tuple[list[tuple[int, bytes]], bool]:
    """What comes until the end of a list, and whether nothing changed meanwhile."""
    found: list[tuple[int, bytes]] = []
    whole, until = True, time.monotonic() + ANSWER_S
    while select.select([opened], [], [], max(until - time.monotonic(), 0))[0]:
        for kind, flags, body in messages_of(opened.recv(BUFFER_BYTES)):
            whole = whole and not flags & _INTERRUPTED
            if kind == _DONE:
                return found, whole
            if kind == _ERROR:
                code = -struct.unpack_from("=i", body)[0]
                raise CannotInspect(f"the kernel does not list the network interfaces: {os.strerror(code)}")
            found.append((kind, body))
    raise CannotInspect(f"the kernel did not list the network interfaces within {ANSWER_S:.0f} s")


def _number(packed: bytes) -> int:
    return int.from_bytes(packed[:4], sys.byteorder)


def _text(packed: bytes) -> str:
    return packed.split(b"\0")[0].decode(errors="replace")
