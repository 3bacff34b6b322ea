"""This module does the handshakes of the data port, in which a client proves that it knows a job's token.

Any program that reaches the port can connect, and a connection costs an attacker nothing. So an unproven connection
gets no thread, little memory and little time, and the number of unproven connections is limited, in total and per
address. Above the total limit, the oldest connection of the address with the most connections is closed. A client that
knows the token proves it at once, so its connection is not among the oldest.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import selectors
import socket
import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from typing import cast

import structlog

from agent.checkpoints.peers.wire import MAGIC, Greeting, Message, Wire
from everstep.errors import WireError

GREET_S = 5.0
"""A client that has not proven a token within this time is refused, seconds."""
MOST_UNPROVEN = 512
"""Limit of unproven connections, from all addresses together."""
MOST_FROM_ONE = 64
"""Limit of unproven connections from one address. It suffices, because a client proves its token within a round trip,
and each rank of a machine connects one connection after the other."""
BACKLOG = 512
"""The largest number of connections that wait to be accepted."""
LOG_S = 60.0
"""Time between two lines in the log about refused connections, seconds."""
FULL_S = 0.1
"""Wait before the next connection is accepted if the process has no file descriptor left, seconds."""

KeyOf = Callable[[str, bytes, bytes], bytes]
"""``key_of(job, server_nonce, client_nonce)``: return a connection's key; a random key if the job has no token."""
Enter = Callable[[socket.socket, str, Wire, str, Message], None]
"""``enter(connection, address, wire, job, first_message)``: serve a proven connection; must return at once."""

logger = structlog.get_logger()


def origin(address: str) -> str:
    """Return the origin for which connections are counted: an IPv4 address, or an IPv6 /64 network, which one machine
    can own."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv4Address):
        return str(found)
    return str(found.ipv4_mapped or ipaddress.IPv6Network((int(found) >> 64 << 64, 64)))


class Waiting:
    """A connection whose client has not proven a token yet."""

    def __init__(self, connection: socket.socket, address: str) -> None:
        self.connection = connection
        self.address = address
        self.until = time.monotonic() + GREET_S
        self.greeting = Greeting(os.urandom)


class Handshakes:
    """Accepts connections and reads their greetings, in a thread of its own.

    Args:
        listeners: Sockets that accept the connections.
        key_of: See :data:`KeyOf`.
        enter: See :data:`Enter`.
    """

    def __init__(self, listeners: Sequence[socket.socket], key_of: KeyOf, enter: Enter) -> None:
        self._listeners = listeners
        self._key_of, self._enter = key_of, enter
        self._closed = threading.Event()
        self._selector = selectors.DefaultSelector()
        self._waiting: OrderedDict[socket.socket, Waiting] = OrderedDict()
        """Unproven connections, the oldest first."""
        self._of: defaultdict[str, OrderedDict[socket.socket, Waiting]] = defaultdict(OrderedDict)
        """Address → its unproven connections, the oldest first."""
        self._logged_s, self._turned_away = -LOG_S, 0
        self._thread = threading.Thread(target=self._run, name="data port", daemon=True)

    def open(self) -> None:
        """Start to accept."""
        for listener in self._listeners:
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ)
        self._thread.start()

    def close(self) -> None:
        """Stop accepting; clients that wait are refused."""
        self._closed.set()
        for listener in self._listeners:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        if self._thread.ident is not None:
            self._thread.join()
        for listener in self._listeners:
            listener.close()
        self._selector.close()

    def _run(self) -> None:
        try:
            while not self._closed.is_set():
                for key, _ in self._selector.select(self._patience()):
                    if key.data is None:
                        self._accept(cast(socket.socket, key.fileobj))
                    elif key.data.connection in self._waiting:  # it was not closed meanwhile
                        self._read_greeting(key.data)
                self._turn_away_late()
        finally:
            for waiting in list(self._waiting.values()):
                self._forget(waiting)
                waiting.connection.close()

    def _patience(self) -> float | None:
        oldest = next(iter(self._waiting.values()), None)
        return None if oldest is None else max(oldest.until - time.monotonic(), 0.0)

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, peer = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return  # the client closed it again
        except OSError as error:
            if not self._closed.is_set():
                logger.error("the data port cannot accept a connection", reason=str(error))
                self._turn_away(next(iter(self._waiting.values()), None), str(error))
                self._closed.wait(FULL_S)
            return
        address = origin(str(peer[0]))
        self._make_room(address)
        waiting = Waiting(connection, address)
        try:
            connection.send(MAGIC + waiting.greeting.nonce, socket.MSG_DONTWAIT)  # fits into a new connection's buffer
        except OSError:
            connection.close()
            return
        self._waiting[connection] = self._of[address][connection] = waiting
        self._selector.register(connection, selectors.EVENT_READ, waiting)

    def _make_room(self, address: str) -> None:
        from_address = self._of.get(address) or OrderedDict()
        if len(from_address) >= MOST_FROM_ONE:
            self._turn_away(next(iter(from_address.values())), "too many connections from its address prove no token")
        elif len(self._waiting) >= MOST_UNPROVEN:
            most = max(self._of.values(), key=len)
            self._turn_away(next(iter(most.values())), "too many connections have proven no token")

    def _read_greeting(self, waiting: Waiting) -> None:
        try:
            waiting.greeting.add(waiting.connection.recv(waiting.greeting.missing(), socket.MSG_DONTWAIT))
            if waiting.greeting.missing():
                return
            greeting = waiting.greeting
            job, key = greeting.job, self._key_of(greeting.job, greeting.nonce, greeting.client_nonce)
            wire, message = greeting.proven(waiting.connection, key)
        except BlockingIOError:
            return
        except WireError as error:
            self._turn_away(waiting, str(error))
        except OSError:
            self._forget(waiting)
            waiting.connection.close()
        else:
            self._forget(waiting)
            self._enter(waiting.connection, waiting.address, wire, job, message)

    def _turn_away_late(self) -> None:
        now = time.monotonic()
        while (oldest := next(iter(self._waiting.values()), None)) and oldest.until <= now:
            self._turn_away(oldest, f"it has proven no token within {GREET_S:g} s")

    def _turn_away(self, waiting: Waiting | None, reason: str) -> None:
        if waiting is None:
            return
        self._forget(waiting)
        waiting.connection.close()
        self._turned_away += 1
        if time.monotonic() - self._logged_s >= LOG_S:
            logger.warning(
                "a connection to the data port is refused",
                peer=waiting.address,
                reason=reason,
                refused=self._turned_away,
            )
            self._logged_s, self._turned_away = time.monotonic(), 0

    def _forget(self, waiting: Waiting) -> None:
        self._selector.unregister(waiting.connection)
        del self._waiting[waiting.connection]
        del self._of[waiting.address][waiting.connection]
        if not self._of[waiting.address]:
            del self._of[waiting.address]
