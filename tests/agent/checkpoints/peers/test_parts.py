"""The parts of a payload arrive over several connections, in any order, and are counted and digested once."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.checkpoints.peers import parts as parts_module
from agent.checkpoints.peers.parts import Incoming, Parts, connections_for
from everstep.errors import WireError
from everstep.slots.checksum import PayloadChecksum
from everstep.slots.format import SlotHeader
from everstep.slots.owner import SlotOwner

PART = 100


@pytest.fixture(autouse=True, scope="module")
def _small_parts() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts_module, "PART", PART)
        yield


def header(size: int, step: int = 7) -> SlotHeader:
    return SlotHeader(step, 1, size, 0, 0, 0)


@given(st.integers(0, 1200), st.integers(1, 60), st.integers(1, 5), st.randoms())
def test_any_order_ends_with_the_same_checksum(size: int, piece: int, wires: int, numbers: random.Random) -> None:
    """Each connection carries its part in pieces; after a random number of pieces, all connections break."""
    data = numbers.randbytes(size)
    view = memoryview(bytearray(size))
    incoming = Incoming(header(size), view)
    sent = 0
    while missing := incoming.missing():
        parts, breaks_after = Parts(missing), numbers.randint(1, 40)
        taken = {wire: parts.take() for wire in range(wires)}
        for _ in range(breaks_after):
            busy = [wire for wire, part in taken.items() if part]
            if not busy:
                break
            wire = numbers.choice(busy)
            start, stop = taken[wire]  # type: ignore[misc]
            end = min(start + piece, stop)
            incoming.room(start, stop)[: end - start] = data[start:end]
            incoming.arrived(start, end)
            sent += end - start
            taken[wire] = (end, stop) if end < stop else parts.take()
    assert sent == size == incoming.done, "no byte was carried twice"
    assert bytes(view) == data
    whole = PayloadChecksum()
    whole.update(data)
    owner = SlotOwner("job", "run", 0)
    assert incoming.checksum().value(owner, 7) == whole.value(owner, 7)


@given(st.lists(st.tuples(st.integers(0, 500), st.integers(0, 300)), max_size=5))
def test_parts_cover_what_is_missing_exactly(gaps: list[tuple[int, int]]) -> None:
    missing, at = [], 0
    for skipped, length in gaps:
        missing.append((at + skipped, at + skipped + length))
        at += skipped + length + 1
    parts, taken = Parts(missing), []
    while part := parts.take():
        assert 0 < part[1] - part[0] <= PART
        taken.append(part)
    assert [byte for start, stop in taken for byte in range(start, stop)] == [
        byte for start, stop in missing for byte in range(start, stop)
    ]


def test_bytes_that_arrived_are_never_written_again() -> None:
    incoming = Incoming(header(300), memoryview(bytearray(300)))
    incoming.arrived(100, 200)
    for start, stop in ((0, 101), (150, 160), (199, 300)):
        with pytest.raises(WireError, match="sent twice"):
            incoming.room(start, stop)
    for start, stop in ((200, 301), (-5, 10), (20, 10)):
        with pytest.raises(WireError, match="of a payload of 300 bytes"):
            incoming.room(start, stop)
    assert len(incoming.room(0, 100)) == len(incoming.room(200, 300)) == 100


def test_an_incomplete_payload_has_no_checksum() -> None:
    incoming = Incoming(header(300), memoryview(bytearray(300)))
    incoming.arrived(0, 100)
    incoming.arrived(200, 300)
    with pytest.raises(WireError, match="ends without bytes 100 to 200"):
        incoming.checksum()


@pytest.mark.parametrize(
    ("size", "most", "expected"), [(0, 4, 1), (100, 4, 1), (101, 4, 2), (10_000, 4, 4), (350, 9, 4)]
)
def test_a_small_state_needs_one_connection(size: int, most: int, expected: int) -> None:
    assert connections_for(size, most) == expected
