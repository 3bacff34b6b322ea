"""The data port receives backups from other agents, and sends them copies for a restore."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from functools import partial

import structlog

from agent.checkpoints.peers.backup import Transfer
from agent.checkpoints.peers.backups import PeerBackups
from agent.checkpoints.peers.copy_requests import Join, Offer, Request, as_message, as_part, parse
from agent.checkpoints.peers.handshake import BACKLOG, Handshakes
from agent.checkpoints.peers.wire import SILENT_S, Message, Wire, session_key
from everstep.base.addresses import ANY_PORT, Ports
from everstep.errors import BackupRefused, CheckpointError, CorruptCheckpoint, Fenced, WireError
from everstep.slots.format import backup_slots, own_slots
from everstep.slots.reader import SlotReader
from everstep.system.bulk_threads import yield_the_core
from everstep.system.listening import address_of, listen

MOST_CONNECTIONS = 256
"""The largest number of connections with a token; each has a thread. Further connections are closed."""
IDLE_S = 120.0
"""A connection without a request for this long is closed, seconds; its client can connect again."""
PIECE = 4 << 20

logger = structlog.get_logger()


class Tokens:
    """The keys of the data port: each job has a random token, which is valid until this agent ends; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tokens: dict[str, bytes] = {}

    def issue(self, job: str) -> bytes:
        """Return the token of a job, which is made at the first call."""
        with self._lock:
            return self._tokens.setdefault(job, secrets.token_bytes(32))

    def of(self, job: str) -> bytes | None:
        """Return the token of a job; None: it has no token."""
        with self._lock:
            return self._tokens.get(job)

    def forget(self, job: str) -> None:
        """Forget the token of a job that is over; no connection with the token is accepted any more."""
        with self._lock:
            self._tokens.pop(job, None)


class DataPort:
    """Listens for connections and serves them. Each connection that has proven a token has its own thread.

    Args:
        hosts: Addresses to listen on.
        tokens: The keys of the jobs whose agents may connect.
        ports: The ports to try on each address.
        why_not: Why offers of backups are refused; empty: they are accepted.

    Raises:
        OSError: this machine does not have an address, or no port is free.
    """

    def __init__(self, hosts: Sequence[str], tokens: Tokens, ports: Ports = ANY_PORT, why_not: str = "") -> None:
        self._why_not = why_not
        self._tokens = tokens
        self._copies_of: Callable[[str], PeerBackups | None] = lambda _: None
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        with contextlib.ExitStack() as opened:
            listeners = [opened.enter_context(listen(host, ports, backlog=BACKLOG)) for host in hosts]
            opened.pop_all()
        self.addresses = [address_of(listener) for listener in listeners]
        """The addresses on which it listens, in the order of the hosts."""
        self._handshakes = Handshakes(listeners, self._key, self._enter)

    def start(self, copies_of: Callable[[str], PeerBackups | None]) -> None:
        """Start to serve.

        Args:
            copies_of: Returns a job's backups, or None if the job is not known here; called in any thread.
        """
        self._copies_of = copies_of
        self._handshakes.open()

    def close(self) -> None:
        """Stop serving; connections break."""
        self._handshakes.close()
        with self._lock:
            open_now = list(self._connections)
        for connection in open_now:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _key(self, job: str, nonce: bytes, client_nonce: bytes) -> bytes:
        # If the job has no token, the client gets the same answer as for a wrong token, and as fast.
        return session_key(self._tokens.of(job) or os.urandom(32), job, nonce, client_nonce)

    def _enter(self, connection: socket.socket, peer: str, wire: Wire, job: str, request: Message) -> None:
        with self._lock:
            full = len(self._connections) >= MOST_CONNECTIONS
            if not full:
                self._connections.add(connection)
        if full:
            logger.warning("the data port has too many connections", peer=peer, most=MOST_CONNECTIONS)
            connection.close()
            return
        arguments = (connection, peer, wire, job, request)
        threading.Thread(target=self._serve, args=arguments, name=f"data from {peer}", daemon=True).start()

    def _serve(self, connection: socket.socket, peer: str, wire: Wire, job: str, request: Message) -> None:
        yield_the_core()
        try:
            with contextlib.suppress(OSError, Fenced):  # the client can connect again
                self._converse(wire, job, request)
        except WireError as error:
            logger.warning("a connection to the data port is refused", peer=peer, reason=str(error))
        except Exception as error:
            logger.error("a connection to the data port failed", peer=peer, exc_info=error)
        finally:
            with self._lock:
                self._connections.discard(connection)
            connection.close()

    def _converse(self, wire: Wire, job: str, request: Message) -> None:
        copies = self._copies_of(job)
        if copies is None:
            raise WireError(f"job {job[:40]!r} is not known here")
        while True:
            wire.set_patience(SILENT_S)
            match parse(request):
                case Offer() if self._why_not:
                    wire.send({"refused": self._why_not, "newest": -1})
                case Offer() as offer:
                    receive_offer(wire, offer, copies)
                case Join() as join:
                    receive_parts(wire, join, copies)
                case Request() as get:
                    send_copy(wire, get, copies)
            wire.set_patience(IDLE_S)
            request = wire.receive()


def receive_offer(wire: Wire, offer: Offer, received: PeerBackups) -> None:
    """Handle a PUT on the receiver's side."""
    try:
        with received.transfer(offer, wire) as transfer:
            if transfer.grows():
                wire.send({"allocating": True})
            transfer.begin()
            wire.send({"missing": transfer.missing(), "held": transfer.held, "transfer": transfer.number})
            if not transfer.held:
                if not _fill(wire, transfer):
                    transfer.give_up()
                    return
                transfer.commit()
        wire.send({"ok": True})
    except CorruptCheckpoint as error:
        wire.send({"damaged": str(error)})
    except BackupRefused as error:
        wire.send({"refused": str(error), "newest": error.newest})
    except (Fenced, CheckpointError) as error:
        wire.send({"refused": str(error), "newest": -1})


def receive_parts(wire: Wire, join: Join, received: PeerBackups) -> None:
    """Handle a further connection of a PUT on the receiver's side."""
    try:
        with received.joined(join.rank, join.transfer, wire) as transfer:
            wire.send({"joined": True})
            _fill(wire, transfer)
        wire.send({"ok": True})
    except BackupRefused as error:
        wire.send({"refused": str(error), "newest": -1})


def _fill(wire: Wire, transfer: Transfer) -> bool:
    """Receive the parts that a connection carries; returns False if the sender gave up the copy."""
    incoming = transfer.incoming
    while True:
        wire.set_patience(IDLE_S)  # a connection that has no more parts waits for the others
        part = as_part(wire.receive())
        wire.set_patience(SILENT_S)
        if part.start < 0:
            return not part.gone
        at = part.start
        with incoming.room(at, part.stop) as room:
            while at < part.stop and (count := wire.receive_chunk(room[at - part.start :])):
                incoming.arrived(at, at + count)
                at += count


def send_copy(wire: Wire, request: Request, copies: PeerBackups) -> None:
    """Handle a GET on the sender's side: send the header, then the payload, which the receiver verifies."""
    path = (own_slots if request.file == "own" else backup_slots)(copies.shm, request.rank)
    try:
        reader = SlotReader(path, copies.owner(request.rank))
    except (OSError, CorruptCheckpoint) as error:
        wire.send({"gone": f"{path.name} cannot be read: {error}"})
        return
    with contextlib.closing(reader):
        header = reader.header(request.step)
        if header is None:
            wire.send({"gone": f"{path.name} does not hold step {request.step}"})
            return
        end = header.payload_bytes
        if request.length >= 0:
            end = min(end, request.offset + request.length)
        wire.send({"header": as_message(header)})
        at = request.offset
        while at < end:
            if reader.header(request.step) != header:
                wire.give_up()
                return
            count = min(PIECE, end - at)
            wire.send_chunk_from(partial(reader.send, header), at, count)
            at += count
