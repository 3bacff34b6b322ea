"""Slots are transferred between two agents over real sockets that break."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.checkpoints.peers.fetch import fetch_range, fetch_slot
from agent.checkpoints.peers.send_slot import Fate, put
from agent.checkpoints.peers.wire import connect
from everstep.base.addresses import Address
from everstep.errors import AgentUnreachable, CorruptCheckpoint, WireError
from everstep.slots.file import SlotFile
from everstep.slots.reader import SlotReader
from tests.agent.checkpoints.peers.sides import HOST, JOB, OWNER, Network, offer, only, save, side
from tests.everstep.slots.saved import payload_at

SIZES = st.integers(0, 300_000)
BREAKS = st.lists(st.integers(0, 350_000), max_size=4)
HELLO = 8 + 32 + 40
"""The approximate number of bytes before the first message."""


def send(path, header, wire, piece: int = 20_000, **more):  # type: ignore[no-untyped-def]
    with contextlib.closing(SlotReader(path)) as reader, contextlib.closing(wire):
        return put(only(wire, piece), reader, header, offer(header, **more))


@settings(max_examples=30)
@given(SIZES, BREAKS, st.integers(1_000, 70_000), st.randoms())
def test_a_backup_that_breaks_anywhere_ends_with_the_same_bytes(
    size: int, breaks: list[int], piece: int, numbers: random.Random
) -> None:
    data = numbers.randbytes(size)
    with side() as mine, side() as peer, Network(peer.address.port, breaks=breaks) as network:
        header = save(mine.shm / "checkpoint-0", 7, data, structure=numbers.randbytes(size % 999))
        for _ in range(len(breaks) + 1):
            try:
                outcome = send(mine.shm / "checkpoint-0", header, peer.connect(network), piece=piece)
            except (OSError, WireError):
                continue
            assert outcome.fate is Fate.KEPT
            break
        else:
            raise AssertionError("one connection must have been without a break")
        assert peer.payload(0, 7) == mine.payload(0, 7, "checkpoint")


@settings(max_examples=30)
@given(SIZES, BREAKS, st.sampled_from(["own", "backup"]), st.randoms())
def test_a_restore_that_breaks_anywhere_ends_with_the_same_bytes(
    size: int, breaks: list[int], file: str, numbers: random.Random
) -> None:
    data = numbers.randbytes(size)
    name = "checkpoint" if file == "own" else "backup"
    with side() as mine, side() as peer, Network(peer.address.port, breaks=breaks[:2], back=True) as network:
        save(peer.shm / f"{name}-3", 7, data)
        with contextlib.closing(SlotFile(mine.shm / "checkpoint-3", slots=3, owner=OWNER(3))) as into:
            moved = fetch_slot(lambda: peer.connect(network), 3, 7, file, into)  # type: ignore[arg-type]
        assert moved == len(mine.payload(3, 7, "checkpoint"))
        assert mine.payload(3, 7, "checkpoint") == peer.payload(3, 7, name)


def test_what_came_is_not_sent_again() -> None:
    data = random.Random(1).randbytes(1_000_000)
    with side() as mine, side() as peer, Network(peer.address.port, breaks=[600_000]) as network:
        header = save(mine.shm / "checkpoint-0", 7, data)
        with pytest.raises((OSError, WireError)):
            send(mine.shm / "checkpoint-0", header, peer.connect(network))
        deadline = time.monotonic() + 10
        while peer.port._connections and time.monotonic() < deadline:  # the peer still reads the bytes that arrived
            time.sleep(0.01)
        assert peer.steps(0) == [], "a part of a slot does not count"
        outcome = send(mine.shm / "checkpoint-0", header, peer.connect(network))
        assert outcome.fate is Fate.KEPT
        assert 400_000 <= outcome.bytes < 450_000
        assert send(mine.shm / "checkpoint-0", header, peer.connect()).bytes == 0, (
            "the peer already has the step, so nothing is sent"
        )


def test_a_newer_step_takes_the_place_of_a_part() -> None:
    data = random.Random(1).randbytes(200_000)
    with side() as mine, side() as peer, Network(peer.address.port, breaks=[100_000]) as network:
        path = mine.shm / "checkpoint-0"
        first = save(path, 7, data)
        with pytest.raises((OSError, WireError)):
            send(path, first, peer.connect(network))
        second = save(path, 8, data[::-1])
        assert send(path, second, peer.connect()).fate is Fate.KEPT
        assert peer.payload(0, 8) == mine.payload(0, 8, "checkpoint")
        assert send(path, first, peer.connect()).newest == 8, "a step that is older than the newest backup is refused"


@pytest.mark.parametrize("where", [0.01, 0.5, 0.99])
def test_a_flipped_bit_on_the_wire_is_never_committed(where: float) -> None:
    data = random.Random(2).randbytes(500_000)
    with side() as mine, side() as peer:
        path = mine.shm / "checkpoint-0"
        header = save(path, 7, data)
        with Network(peer.address.port, flip_at=HELLO + 2_000 + int(where * 490_000)) as network:
            try:
                outcome = send(path, header, peer.connect(network, patience_s=1), piece=600_000)
            except (OSError, WireError):  # the flipped bit was in the length of a piece
                outcome = None
        assert outcome is None or (outcome.fate is Fate.REFUSED and "on its way" in outcome.reason)
        assert peer.steps(0) == []
        assert send(path, header, peer.connect()).fate is Fate.KEPT


def test_a_flipped_bit_on_the_way_back_is_never_restored() -> None:
    data = random.Random(2).randbytes(500_000)
    with side() as mine, side() as peer, Network(peer.address.port, flip_at=300_000, back=True) as network:
        save(peer.shm / "backup-0", 7, data)
        with (
            contextlib.closing(SlotFile(mine.shm / "checkpoint-0", slots=3, owner=OWNER(0))) as into,
            pytest.raises(CorruptCheckpoint, match="does not match its checksum"),
        ):
            fetch_slot(lambda: peer.connect(network), 0, 7, "backup", into)
        assert mine.steps(0, "checkpoint") == []


def test_a_bit_that_flipped_in_own_memory_is_found_by_the_peer() -> None:
    with side() as mine, side() as peer:
        path = mine.shm / "checkpoint-0"
        header = save(path, 7, bytes(100_000))
        with path.open("r+b") as file:
            file.seek(payload_at(path, 7) + 5000)
            file.write(b"\1")
        outcome = send(path, header, peer.connect())
        assert outcome.fate is Fate.DAMAGED
        assert "its own memory" in outcome.reason
        assert peer.steps(0) == []


def test_own_memory_that_was_cut_short_is_called_damaged() -> None:
    with side() as mine, side() as peer:
        path = mine.shm / "checkpoint-0"
        header = save(path, 7, bytes(100_000))
        os.truncate(path, payload_at(path, 7) + 50_000)
        outcome = send(path, header, peer.connect())
        assert outcome.fate is Fate.DAMAGED
        assert "cut short in its own memory" in outcome.reason
        assert peer.steps(0) == []


def test_a_slot_that_the_rank_needs_is_given_up() -> None:
    with side() as mine, side() as peer:
        path = mine.shm / "checkpoint-0"
        header = save(path, 7, bytes(100_000))
        with contextlib.closing(SlotFile(path, slots=3, owner=OWNER(0))) as file:
            file.forget(7)
        with contextlib.closing(peer.connect()) as wire, contextlib.closing(SlotReader(path)) as reader:
            assert put(only(wire), reader, header, offer(header)).fate is Fate.GONE
            again = save(path, 8, bytes(100_000))
            assert put(only(wire), reader, again, offer(again)).fate is Fate.KEPT, (
                "the next step is sent on the same connection"
            )


def test_what_is_gone_cannot_be_fetched() -> None:
    with (
        side() as mine,
        side() as peer,
        contextlib.closing(SlotFile(mine.shm / "checkpoint-0", slots=3, owner=OWNER(0))) as into,
    ):
        save(peer.shm / "backup-0", 7, b"x" * 1000)
        for rank, step in ((0, 8), (1, 7)):
            with pytest.raises(CorruptCheckpoint, match=r"does not hold step 8|cannot be read"):
                fetch_slot(peer.connect, rank, step, "backup", into)
        with pytest.raises(AgentUnreachable):
            fetch_slot(lambda: connect(Address(HOST, 1), JOB, bytes(32), connect_s=0.2), 0, 7, "backup", into)


def test_a_part_of_a_payload() -> None:
    data = random.Random(3).randbytes(50_000)
    with side() as peer:
        save(peer.shm / "checkpoint-2", 9, data)
        found = bytearray(30_000)
        header = fetch_range(peer.connect, 2, 9, memoryview(found))
        assert (header.completed_steps, bytes(found)) == (9, data[:30_000])
        with pytest.raises(CorruptCheckpoint, match="too few"):
            fetch_range(peer.connect, 2, 9, memoryview(bytearray(60_000)))


def test_who_does_not_know_the_token_gets_nothing() -> None:
    with side() as mine, side() as peer:
        header = save(mine.shm / "checkpoint-0", 7, b"x" * 1000)
        peer.tokens.issue(JOB)
        for token, job in ((bytes(32), JOB), (peer.tokens.issue(JOB), "other")):
            wire = connect(peer.address, job, token, patience_s=5)
            with pytest.raises((OSError, WireError)):
                send(mine.shm / "checkpoint-0", header, wire)
        assert list(peer.shm.iterdir()) == [], "no file was made for clients without a token"


@pytest.mark.parametrize("said", [b"", b"\xff" * 70_000, b"GET / HTTP/1.1\r\n\r\n" * 10, bytes(200)])
def test_whoever_talks_nonsense_is_turned_away(said: bytes) -> None:
    with side() as peer:
        peer.tokens.issue(JOB)
        with socket.create_connection((HOST, peer.address.port), timeout=20) as connection:
            with contextlib.suppress(OSError):
                connection.sendall(said)
                connection.shutdown(socket.SHUT_WR)
            greeting = b""
            with contextlib.suppress(ConnectionResetError):
                while part := connection.recv(1 << 16):
                    greeting += part
        assert len(greeting) <= 8 + 32
        assert list(peer.shm.iterdir()) == []
