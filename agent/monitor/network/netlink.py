"""This module uses rtnetlink to list the network interfaces of this thread's namespace, and to wait for their changes.

/sys/class/net may show another network namespace than that of the process; a netlink socket always shows the right one.
The formats are from rtnetlink(7) and from the kernel's ``if_link.h`` and ``if_addr.h``.
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
"""Longest wait for an answer of the kernel, seconds."""
TRIES = 3
"""If a list changes while it is read, it is read again, up to this many times in all."""
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
_NAME, _LOWER, _MASTER, _LINK_INFO, _STATISTICS, _CHANGES, _DOWNS = 3, 5, 10, 18, 23, 35, 48
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
    """The kernel's number of the interface. An interface that is created anew with the same name has another index."""
    name: str
    kind: str = ""
    """Kind of a virtual interface, e.g. ``veth``; empty: it is hardware."""
    lower: int = 0
    """Index of the interface on which a ``vlan`` or a similar interface lies; 0: none. For a ``veth`` it is the other
    end, which may be in another network namespace."""
    master: int = 0
    """Index of the bond or the bridge to which the interface belongs; 0: none."""
    loopback: bool = False
    switched_on: bool = True
    """Whether an administrator has switched it on."""
    carrier: bool = True
    """Whether the interface is switched on and has a link. It is as current as ``downs``; the kernel's operational
    state lags."""
    downs: int = 0
    """How often it has lost its carrier since it was created."""
    statistics: dict[str, int] = field(default_factory=dict)
    """Name in ``STATISTICS`` → the counter since the interface was created."""
    own: bool = False
    """Whether the interface has the agent's address."""


def links() -> dict[str, Link]:
    """Return all interfaces by name.

    Raises:
        CannotInspect: the kernel does not answer.
    """
    messages = _listed(_GET_LINK, _LINK.pack(socket.AF_UNSPEC, 0, 0, 0, 0))
    found = [link_of(body) for kind, body in messages if kind == _NEW_LINK]
    return {link.name: link for link in found}


def addresses() -> dict[str, int]:
    """Return all IP addresses, each with the index of its interface.

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
    """Waits until an interface changes, in the network namespace of the thread that calls ``open``."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self._wake_up = WakeUp()
        self._turn = threading.Lock()
        self._ended = False

    def open(self) -> None:
        """Receive changes from now on. Interfaces that are listed after this call miss no change.

        Raises:
            CannotInspect: the kernel does not open the socket.
        """
        if self._socket is None and not self._ended:
            self._socket = _socket(_GROUP_LINK)

    def wait(self, indexes: set[int], wait_s: float) -> bool:
        """Wait until one of these interfaces changes.

        Args:
            indexes: The kernel's indexes of the interfaces. Changes of others are ignored.
            wait_s: Longest wait, seconds.

        Returns:
            Whether an interface changed, or may have changed because messages were lost.

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
        """End the current or the next wait; the wait returns that nothing changed."""
        self._wake_up.ring()

    def close(self) -> None:
        """End the current wait and all later ones. A waiting thread closes the socket itself."""
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
                received = self._socket.recv(BUFFER_BYTES)
            except BlockingIOError:
                continue
            except OSError:  # ENOBUFS: the kernel dropped messages because too much changed
                return True
            if any(
                _LINK.unpack_from(body)[2] in indexes
                for kind, _, body in messages_of(received)
                if kind in (_NEW_LINK, _DELETED_LINK)
            ):
                return True
        return False


def link_of(body: bytes) -> Link:
    """Return the interface that an ``RTM_NEWLINK`` message describes; ``body``: the message without its header."""
    _, _, index, flags, _ = _LINK.unpack_from(body)
    attributes = dict(attributes_of(body[_LINK.size :]))
    info = dict(attributes_of(attributes.get(_LINK_INFO, b"")))
    counters = attributes.get(_STATISTICS, b"")
    known = min(len(counters) // 8, len(STATISTICS))
    # A kernel before 4.16 counts only changes of the carrier: every second change is a loss of the carrier.
    downs = _number(attributes[_DOWNS]) if _DOWNS in attributes else _number(attributes.get(_CHANGES, b"")) // 2
    return Link(
        index=index,
        name=_text(attributes.get(_NAME, b"")),
        kind=_text(info.get(_INFO_KIND, b"")),
        lower=_number(attributes.get(_LOWER, b"")),
        master=_number(attributes.get(_MASTER, b"")),
        loopback=bool(flags & _FLAG_LOOPBACK),
        switched_on=bool(flags & _FLAG_UP),
        carrier=bool(flags & _FLAG_UP and flags & _FLAG_LOWER_UP),
        downs=downs,
        statistics=dict(zip(STATISTICS, struct.unpack_from(f"={known}Q", counters), strict=False)),
    )


def messages_of(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Yield type, flags and body of each netlink message in a datagram, up to an incomplete one."""
    at = 0
    while at + _HEADER.size <= len(data):
        length, kind, flags, _, _ = _HEADER.unpack_from(data, at)
        if not _HEADER.size <= length <= len(data) - at:
            return
        yield kind, flags, data[at + _HEADER.size : at + length]
        at += (length + 3) & ~3


def attributes_of(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield type and value of each attribute, up to an incomplete one."""
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
        raise CannotInspect(f"the kernel does not open a netlink socket: {error.strerror}") from error
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        opened.bind((0, groups))
        opened.setblocking(False)
    except OSError as error:
        opened.close()
        raise CannotInspect(f"the netlink socket cannot be used: {error.strerror}") from error
    return opened


def _listed(kind: int, body: bytes) -> list[tuple[int, bytes]]:
    """Return the type and the body of all messages of a list."""
    with _socket() as opened:
        for number in range(1, TRIES + 1):
            header = _HEADER.pack(_HEADER.size + len(body), kind, _REQUEST | _DUMP, number, 0)
            opened.send(header + body)
            found, is_consistent = _answer(opened)
            if is_consistent:
                return found
    raise CannotInspect(f"the network interfaces changed {TRIES} times while they were listed")


def _answer(opened: socket.socket) -> tuple[list[tuple[int, bytes]], bool]:
    """Return the messages up to the end of a list, and whether nothing changed while they were read."""
    found: list[tuple[int, bytes]] = []
    is_consistent, until = True, time.monotonic() + ANSWER_S
    while select.select([opened], [], [], max(until - time.monotonic(), 0))[0]:
        for kind, flags, body in messages_of(opened.recv(BUFFER_BYTES)):
            is_consistent = is_consistent and not flags & _INTERRUPTED
            if kind == _DONE:
                return found, is_consistent
            if kind == _ERROR:
                code = -struct.unpack_from("=i", body)[0]
                raise CannotInspect(f"the kernel does not list the network interfaces: {os.strerror(code)}")
            found.append((kind, body))
    raise CannotInspect(f"the kernel did not list the network interfaces within {ANSWER_S:.0f} s")


def _number(packed: bytes) -> int:
    return int.from_bytes(packed[:4], sys.byteorder)


def _text(packed: bytes) -> str:
    return packed.split(b"\0")[0].decode(errors="replace")
