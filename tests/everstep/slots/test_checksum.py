"""The checksum of a payload: it depends on the bytes, the owner and the step, and on nothing else."""

from __future__ import annotations

import os
import threading
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.slots import checksum
from everstep.slots.checksum import PayloadChecksum, hashing_threads
from everstep.slots.owner import SlotOwner

OWNER = SlotOwner("gpt", "20261121-193158.042-0197f3a2", 3)


def value(parts: list[bytes], *, threads: int = 1, owner: SlotOwner = OWNER, step: int = 7) -> int:
    found = PayloadChecksum()
    for part in parts:
        found.update(part, threads)
    return found.value(owner, step)


@settings(max_examples=200)
@given(
    payload=st.binary(max_size=400),
    cuts=st.lists(st.integers(0, 400), max_size=6),
    threads=st.integers(1, 5),
    piece=st.integers(1, 64),
)
def test_neither_the_parts_nor_the_threads_change_it(payload: bytes, cuts: list[int], threads: int, piece: int) -> None:
    ends = sorted(min(cut, len(payload)) for cut in cuts)
    parts = [payload[begin:end] for begin, end in zip([0, *ends], [*ends, len(payload)], strict=True)]
    with mock.patch.object(checksum, "PIECE_BYTES", piece):
        assert value(parts, threads=threads) == value([payload])


@settings(max_examples=200)
@given(
    payload=st.binary(max_size=400),
    most=st.integers(1, 50),
    threads=st.integers(1, 5),
    piece=st.integers(1, 64),
    buffer=st.integers(1, 64),
)
def test_neither_short_reads_nor_the_threads_change_it(
    payload: bytes, most: int, threads: int, piece: int, buffer: int
) -> None:
    def read(offset: int, into: memoryview) -> int:
        part = payload[offset : offset + min(most, len(into))]
        into[: len(part)] = part
        return len(part)

    with mock.patch.multiple(checksum, PIECE_BYTES=piece, READ_BYTES=buffer):
        assert PayloadChecksum.of(read, len(payload), threads).value(OWNER, 7) == value([payload])


def test_threads_read_at_the_same_time_and_a_read_that_ends_early_is_noticed() -> None:
    payload, both = os.urandom(10 << 20), threading.Barrier(2)

    def read(offset: int, into: memoryview) -> int:
        if offset in {0, 4 << 20}:
            both.wait(30)  # each of two threads reads its first piece
        into[:] = payload[offset : offset + len(into)]
        return len(into)

    assert PayloadChecksum.of(read, len(payload), 2).value(OWNER, 7) == value([payload])
    cut = PayloadChecksum.of(lambda offset, into: read(offset, into) if offset < 9 << 20 else 0, len(payload), 2)
    assert cut.value(OWNER, 7) != value([payload])


@given(payload=st.binary(min_size=1, max_size=300), at=st.integers(0), bit=st.integers(0, 7))
def test_every_bit_changes_it(payload: bytes, at: int, bit: int) -> None:
    damaged = bytearray(payload)
    damaged[at % len(payload)] ^= 1 << bit
    with mock.patch.object(checksum, "PIECE_BYTES", 64):
        assert value([bytes(damaged)]) != value([payload])


def test_a_payload_of_real_pieces_is_hashed_by_several_threads() -> None:
    payload = os.urandom(1 << 20) * 21
    assert value([payload[:5_000_000], payload[5_000_000:]], threads=4) == value([payload])
    swapped = payload[1 << 20 : 2 << 20] + payload
    assert value([swapped[: len(payload)]]) == value([payload]), "the payload repeats itself"
    assert value([payload[4 << 20 :] + bytes(4 << 20)]) != value([bytes(4 << 20) + payload[4 << 20 :]]), (
        "the order of the pieces counts"
    )


@pytest.mark.parametrize(
    "other",
    [
        SlotOwner("bert", OWNER.run, 3),
        SlotOwner("gpt", "20261121-193158.043-0197f3a2", 3),
        SlotOwner("gpt", OWNER.run, 4),
    ],
)
def test_the_owner_and_the_step_change_it(other: SlotOwner) -> None:
    assert value([b"state"], owner=other) != value([b"state"])
    assert value([b"state"], step=8) != value([b"state"])
    assert SlotOwner.parse(other.pack()) == other


@pytest.mark.parametrize(
    ("cores", "processes", "threads"), [(1, 1, 1), (2, 1, 2), (2, 8, 1), (64, 8, 4), (16, 8, 2), (192, 0, 4)]
)
def test_the_ranks_of_a_machine_share_its_cores(cores: int, processes: int, threads: int) -> None:
    with mock.patch.object(os, "sched_getaffinity", lambda _: set(range(cores))):
        assert hashing_threads(processes) == threads


def test_a_thread_that_fails_is_not_hidden() -> None:
    with mock.patch("everstep.slots.checksum.xxhash.xxh3_64", side_effect=[mock.DEFAULT, MemoryError, mock.DEFAULT]):  # noqa: SIM117
        with pytest.raises(MemoryError):
            PayloadChecksum().update(bytes(2 * checksum.PIECE_BYTES), threads=2)
