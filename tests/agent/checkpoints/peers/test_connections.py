"""A slot is sent and fetched over several connections at once, which break, stall, or lose their transfer."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.checkpoints.peers import data_port, parts
from agent.checkpoints.peers.copy_requests import Join, PartHeader
from agent.checkpoints.peers.fetch import fetch_slot
from agent.checkpoints.peers.rate_limit import Limiter
from agent.checkpoints.peers.send_slot import Fate, Outcome, PeerConnection, put
from agent.checkpoints.peers.wire import Wire
from everstep.errors import WireError
from everstep.slots.file import SlotFile
from everstep.slots.format import SlotHeader
from everstep.slots.reader import SlotReader
from tests.agent.checkpoints.peers.sides import OWNER, Network, Side, offer, save, side

PART = 40_000
DATA = random.Random(5).randbytes(10 * PART)
MOST = 4
HELLO = 1_000
"""At most as many bytes come before the first part."""


@pytest.fixture(autouse=True, scope="module")
def _small_parts() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "PART", PART)
        yield


class Connections:
    """Connections of a sender, which are made on demand."""

    def __init__(self, peer: Side, through: Network | None = None) -> None:
        self._peer, self._through = peer, through
        self.made: list[PeerConnection] = []

    def __call__(self, count: int) -> list[PeerConnection]:
        while len(self.made) < count:
            self.made.append(PeerConnection(self._peer.connect(self._through), memoryview(bytearray(15_000))))
        return self.made[:count]

    def close(self) -> None:
        for one in self.made:
            one.wire.close()


def send(mine: Side, header: SlotHeader, opened: Connections, *limits: Limiter) -> Outcome:
    with contextlib.closing(SlotReader(mine.shm / "checkpoint-0")) as reader:
        return put(opened, reader, header, offer(header), connections=MOST, limits=limits)


@settings(max_examples=25)
@given(st.integers(0, 400_000), st.lists(st.integers(0, 200_000), max_size=6), st.randoms())
def test_a_backup_whose_connections_break_anywhere_ends_with_the_same_bytes(
    size: int, breaks: list[int], numbers: random.Random
) -> None:
    with side() as mine, side() as peer, Network(peer.address.port, breaks=breaks) as network:
        header = save(mine.shm / "checkpoint-0", 7, numbers.randbytes(size))
        for _ in range(len(breaks) + 1):
            with contextlib.closing(Connections(peer, network)) as opened:
                try:
                    outcome = send(mine, header, opened)
                except (OSError, WireError):
                    assert peer.steps(0) == [], "a part of a slot does not count"
                    continue
                assert outcome.fate is Fate.KEPT
                assert len(opened.made) <= MOST
                break
        else:
            raise AssertionError("at least one attempt must have been without a break")
        assert peer.payload(0, 7) == mine.payload(0, 7, "checkpoint")


@settings(max_examples=25)
@given(st.integers(0, 400_000), st.lists(st.integers(0, 200_000), max_size=2), st.randoms())
def test_a_restore_whose_connections_break_anywhere_ends_with_the_same_bytes(
    size: int, breaks: list[int], numbers: random.Random
) -> None:
    with side() as mine, side() as peer, Network(peer.address.port, breaks=breaks, back=True) as network:
        save(peer.shm / "backup-3", 7, numbers.randbytes(size))
        with contextlib.closing(SlotFile(mine.shm / "checkpoint-3", slots=3, owner=OWNER(3))) as into:
            fetch_slot(lambda: peer.connect(network), 3, 7, "backup", into, connections=MOST)
        assert mine.payload(3, 7, "checkpoint") == peer.payload(3, 7)


def test_a_large_slot_uses_all_connections_and_they_serve_the_next_slot_too() -> None:
    with side() as mine, side() as peer, contextlib.closing(Connections(peer)) as opened:
        small = save(mine.shm / "checkpoint-0", 6, DATA[:PART])
        assert send(mine, small, opened).fate is Fate.KEPT
        assert len(opened.made) == 2, "the slot has one part, and the structure behind it"
        for step in (7, 8):
            assert send(mine, save(mine.shm / "checkpoint-0", step, DATA), opened).fate is Fate.KEPT
            assert len(opened.made) == MOST
            assert peer.payload(0, step) == mine.payload(0, step, "checkpoint")


def test_what_came_over_any_connection_is_not_sent_again() -> None:
    with side() as mine, side() as peer:
        header = save(mine.shm / "checkpoint-0", 7, DATA)
        with (
            Network(peer.address.port, breaks=[HELLO + 30_000] * MOST) as network,
            contextlib.closing(Connections(peer, network)) as opened,
            pytest.raises((OSError, WireError)),
        ):
            send(mine, header, opened)
        wait(lambda: not peer.port._connections, "the peer has read what arrived")
        with contextlib.closing(Connections(peer)) as again:
            outcome = send(mine, header, again)
        assert outcome.fate is Fate.KEPT
        assert outcome.bytes <= header.payload_bytes - 15_000, "at least one piece has arrived"


def test_a_slot_that_the_rank_needs_is_given_up_by_all_connections() -> None:
    with side() as mine, side() as peer, contextlib.closing(Connections(peer)) as opened:
        path = mine.shm / "checkpoint-0"
        header = save(path, 7, DATA)
        with contextlib.closing(SlotFile(path, slots=3, owner=OWNER(0))) as file:
            threading.Timer(0.3, lambda: file.forget(7)).start()
            assert send(mine, header, opened, Limiter(400_000)).fate is Fate.GONE
        assert peer.steps(0) == []
        again = save(path, 8, DATA)
        assert send(mine, again, opened).fate is Fate.KEPT, "the next step is sent on the same connections"
        assert peer.payload(0, 8) == mine.payload(0, 8, "checkpoint")


@contextlib.contextmanager
def two_connections(peer: Side, header: SlotHeader) -> Iterator[tuple[Wire, Wire]]:
    """Offer a slot, and join a second connection, which has sent a half of its part."""
    with contextlib.closing(peer.connect()) as lead, contextlib.closing(peer.connect()) as other:
        lead.send(offer(header).model_dump())
        assert lead.receive() == {"allocating": True}
        number = lead.receive()["transfer"]
        other.send(Join(rank=0, transfer=number).model_dump())
        assert other.receive() == {"joined": True}
        other.send(PartHeader(start=PART, stop=2 * PART).model_dump())
        other.send_chunk(memoryview(DATA)[PART : PART + PART // 2])
        wait(lambda: done(peer) == PART // 2, "the half has arrived")
        yield lead, other


def done(peer: Side) -> int:
    incoming = peer.received._backup(0).incoming
    return incoming.done if incoming else 0


def wait(condition: object, what: str) -> None:
    deadline = time.monotonic() + 20
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, f"after 20 s this is still not true: {what}"
        time.sleep(0.005)


@pytest.mark.parametrize("how", ["offer", "stop", "lead breaks"])
def test_no_connection_writes_into_a_transfer_that_is_over(how: str) -> None:
    with side() as mine, side() as peer:
        header = save(mine.shm / "checkpoint-0", 7, DATA)
        with two_connections(peer, header) as (lead, other):
            if how == "offer":
                with contextlib.closing(Connections(peer)) as opened:
                    outcome = send(mine, header, opened)
                    assert (outcome.fate, outcome.bytes) == (Fate.KEPT, header.payload_bytes - PART // 2)
            elif how == "stop":
                peer.received.stop(1)
            else:
                lead.cut()
                wait(lambda: not peer.port._connections, "the transfer is over")
            with pytest.raises((OSError, WireError)):
                other.send_chunk(memoryview(DATA)[PART + PART // 2 : 2 * PART])
                other.send(PartHeader().model_dump())
                other.receive()
        assert peer.steps(0) == ([7] if how == "offer" else [])
        if how == "offer":
            assert peer.payload(0, 7) == mine.payload(0, 7, "checkpoint")


def test_a_connection_joins_only_the_transfer_that_runs() -> None:
    with side() as mine, side() as peer, contextlib.closing(peer.connect()) as wire:
        join = Join(rank=0, transfer=5).model_dump()
        wire.send(join)
        assert "there is no transfer" in wire.receive()["refused"]
        header = save(mine.shm / "checkpoint-0", 7, DATA)
        with two_connections(peer, header):
            wire.send(join)
            assert "there is no transfer" in wire.receive()["refused"]


def test_a_connection_without_parts_waits_for_a_slow_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_port, "SILENT_S", 0.5)
    with side() as mine, side() as peer:
        header = save(mine.shm / "checkpoint-0", 7, DATA)
        with contextlib.closing(SlotReader(mine.shm / "checkpoint-0")) as reader:
            payload = memoryview(bytearray(header.payload_bytes))
            reader.read_into(header, 0, payload)
        with two_connections(peer, header) as (lead, other):
            for start, stop in ((0, PART), (2 * PART, header.payload_bytes)):
                lead.send(PartHeader(start=start, stop=stop).model_dump())
                lead.send_chunk(payload[start:stop])
            for at in range(PART + PART // 2, 2 * PART, PART // 8):
                time.sleep(0.3)
                other.send_chunk(payload[at : at + PART // 8])
            other.send(PartHeader().model_dump())
            assert other.receive() == {"ok": True}
            lead.send(PartHeader().model_dump())
            assert lead.receive() == {"ok": True}
        assert peer.payload(0, 7) == mine.payload(0, 7, "checkpoint")


@pytest.mark.parametrize("gone", [False, True])
def test_a_connection_that_has_not_ended_is_broken_when_the_leading_one_ends(gone: bool) -> None:
    with side() as mine, side() as peer:
        header = save(mine.shm / "checkpoint-0", 7, DATA)
        with two_connections(peer, header) as (lead, other):
            lead.send(PartHeader(gone=gone).model_dump())
            with pytest.raises((OSError, WireError)):
                other.receive()
            kept = 0 if gone else PART // 2
            wait(lambda: done(peer) == kept, "only a copy that is given up is forgotten")
        assert peer.steps(0) == []


def test_the_limit_holds_for_all_connections_together() -> None:
    with side() as mine, side() as peer, contextlib.closing(Connections(peer)) as opened:
        header = save(mine.shm / "checkpoint-0", 7, DATA)
        began = time.monotonic()
        rate = len(DATA) / 0.8
        assert send(mine, header, opened, Limiter(0), Limiter(rate)).fate is Fate.KEPT
        assert time.monotonic() - began > 0.5
