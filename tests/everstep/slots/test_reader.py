"""A file is read while its rank writes, and a slot of it is received as a copy."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.errors import CheckpointError, CorruptCheckpoint
from everstep.slots.checksum import PayloadChecksum
from everstep.slots.file import SlotFile
from everstep.slots.format import SlotHeader
from everstep.slots.owner import SlotOwner
from everstep.slots.reader import SlotReader, held
from tests.everstep.slots.saved import contents, save
from tests.shm import shm_folder


def read(reader: SlotReader, header: SlotHeader, piece: int = 1000) -> bytes | None:
    """A payload read in pieces; None: it was overwritten meanwhile."""
    payload = bytearray()
    while len(payload) < header.payload_bytes:
        buffer = memoryview(bytearray(piece))
        count = reader.read_into(header, len(payload), buffer)
        if not count:
            return None
        payload += buffer[:count]
    return bytes(payload)


def checksum(header: SlotHeader, payload: bytes) -> int:
    return of(payload).value(SlotOwner("", "", 0), header.completed_steps)


def of(payload: bytes) -> PayloadChecksum:
    found = PayloadChecksum()
    found.update(payload)
    return found


def test_headers_and_payloads_are_what_was_saved(folder: Path) -> None:
    file = SlotFile(folder / "c", generation=4)
    for step in (1, 2, 3, 4):
        save(file, step, 5000)
    reader = SlotReader(folder / "c")
    headers = reader.headers()
    assert [(one.completed_steps, one.generation, one.tensor_bytes) for one in headers] == [
        (step, 4, 5000) for step in (2, 3, 4)
    ]
    assert headers[0].saved_ns < headers[1].saved_ns < headers[2].saved_ns
    for header in headers:
        payload = read(reader, header)
        assert payload is not None and len(payload) == header.payload_bytes
        assert payload[:5000] == contents(header.completed_steps, 5000)
        assert payload[5056:] == b"structure of %d" % header.completed_steps
        assert checksum(header, payload) == header.checksum
    reader.close()


def test_a_step_that_was_overwritten_gives_nothing_more(folder: Path) -> None:
    file = SlotFile(folder / "c", slots=2)
    save(file, 1, 5000)
    save(file, 2, 5000)
    reader = SlotReader(folder / "c")
    header = reader.header(1)
    assert header is not None
    assert reader.read_into(header, 0, memoryview(bytearray(100))) == 100
    file.begin(b"", 5000)
    assert reader.read_into(header, 100, memoryview(bytearray(100))) == 0
    assert reader.header(1) is None and reader.header(2) is not None
    reader.close()


def test_nothing_is_read_beyond_the_payload(folder: Path) -> None:
    file = SlotFile(folder / "c")
    save(file, 1, 100)
    reader = SlotReader(folder / "c")
    (header,) = reader.headers()
    assert reader.read_into(header, 0, memoryview(bytearray(10_000))) == header.payload_bytes
    assert reader.read_into(header, header.payload_bytes, memoryview(bytearray(10))) == 0
    reader.close()


def test_missing_and_foreign_files_are_told_apart(folder: Path) -> None:
    with pytest.raises(FileNotFoundError):
        SlotReader(folder / "none")
    (folder / "c").write_bytes(b"something else" * 1000)
    with pytest.raises(CorruptCheckpoint, match="not a checkpoint file"):
        SlotReader(folder / "c")


@settings(max_examples=60)
@given(st.lists(st.sampled_from(["read", "begin", "write", "commit", "grow"]), max_size=60), st.integers(1, 4000))
def test_no_interleaving_gives_torn_bytes_for_whole(events: list[str], piece: int) -> None:
    """A payload with the right checksum is the saved payload, no matter when the writer interrupts the reader."""
    with shm_folder() as folder:
        file, step, size = SlotFile(folder / "c", slots=2), 1, 6000
        saved = {1: contents(1, size)}
        save(file, 1, size)
        reader = SlotReader(folder / "c")
        header, payload, address = reader.headers()[-1], bytearray(), 0
        for event in events:
            if event == "read":
                buffer = memoryview(bytearray(piece))
                count = reader.read_into(header, len(payload), buffer)
                payload += buffer[:count]
                if (
                    count
                    and len(payload) == header.payload_bytes
                    and checksum(header, bytes(payload)) == header.checksum
                ):
                    assert payload[: header.tensor_bytes] == saved[header.completed_steps]
                if not count or len(payload) == header.payload_bytes:
                    header, payload = reader.headers()[-1], bytearray()
            elif event in {"begin", "grow"} and not address:
                step += 1
                size = size * 4 if event == "grow" and size < 200_000 else size
                saved[step] = contents(step, size)
                address = file.begin(b"structure of %d" % step, size)
            elif event == "write" and address:
                ctypes.memmove(address, saved[step], size // 2)
            elif event == "commit" and address:
                ctypes.memmove(address, saved[step], size)
                file.commit(step)
                address = 0
        reader.close()


WRITER = """
import ctypes, sys
from pathlib import Path
from everstep.slots.checksum import PayloadChecksum
from everstep.slots.file import SlotFile
file = SlotFile(Path(sys.argv[1]), slots=2)
for step in range(1, 10**9):
    size = (1 << 20) + step % 7 * (1 << 17)  # the file grows at first
    address = file.begin(b"step %d" % step, size)
    ctypes.memset(address, step % 251, size)
    file.commit(step)
    if step == 3:
        print("ready", flush=True)
"""


def test_a_reader_beside_a_writer_at_full_speed(folder: Path) -> None:
    """Slots are overwritten all the time. Only the bytes of a single step pass the checksum."""
    path = folder / "c"
    with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True) as writer:
        try:
            assert writer.stdout is not None
            writer.stdout.readline()
            reader, whole, torn = SlotReader(path), 0, 0
            while (whole < 20 or torn < 20) and whole + torn < 2000:
                headers = reader.headers()
                if not headers:
                    continue
                # Sometimes read the older slot, which is about to be overwritten.
                header = headers[-1] if whole <= torn else headers[0]
                payload = read(reader, header, 1 << 16)
                if payload is None or checksum(header, payload) != header.checksum:
                    torn += 1
                    continue
                whole += 1
                step = header.completed_steps
                assert set(payload[: header.tensor_bytes]) == {step % 251}
                assert payload.endswith(b"step %d" % step)
            assert whole
            reader.close()
        finally:
            writer.kill()


def receive(file: SlotFile, header: SlotHeader, payload: bytes) -> None:
    """Receive a slot as the agent does. The agent copies the bytes and computes their checksum."""
    file.receive(header)[:] = payload
    file.commit_received(header, of(payload))


def test_a_copy_is_the_original(folder: Path) -> None:
    save(SlotFile(folder / "c", generation=3), 7, 5000)
    reader = SlotReader(folder / "c")
    (header,) = reader.headers()
    payload = read(reader, header)
    assert payload is not None
    backup = SlotFile(folder / "backup-0", slots=2)
    receive(backup, header, payload)
    assert SlotReader(folder / "backup-0").headers() == [
        header
    ]  # the copy has the generation and the time of the original
    loaded = SlotFile(folder / "backup-0").load(7)
    assert (bytes(loaded.tensors), loaded.structure) == (contents(7, 5000), b"structure of 7")
    reader.close()


def test_a_copy_with_another_checksum_is_not_committed(folder: Path) -> None:
    file = SlotFile(folder / "c")
    for step in (1, 2):
        save(file, step, 5000)
    reader = SlotReader(folder / "c")
    first, second = reader.headers()
    backup = SlotFile(folder / "backup-0", slots=2)
    payload = read(reader, first)
    assert payload is not None
    receive(backup, first, payload)
    damaged = bytearray(payload)
    damaged[17] ^= 1
    with pytest.raises(CorruptCheckpoint, match="the copy of the state after step 2 does not match its checksum"):
        receive(backup, second, bytes(damaged))
    assert [slot.completed_steps for slot in held(folder / "backup-0") if slot.valid] == [1]
    with pytest.raises(CorruptCheckpoint):  # these are the bytes of step 1 with the header of step 2
        receive(backup, second, payload)
    whole = read(reader, second)
    assert whole is not None
    receive(backup, second, whole)
    assert [one.completed_steps for one in SlotReader(folder / "backup-0").headers()] == [1, 2]
    reader.close()


def test_an_interrupted_copy_costs_no_other_step(folder: Path) -> None:
    file = SlotFile(folder / "c")
    for step in (1, 2, 3):
        save(file, step, 5000)
    reader = SlotReader(folder / "c")
    backup = SlotFile(folder / "backup-0", slots=2)
    for header in reader.headers()[:2]:
        payload = read(reader, header)
        assert payload is not None
        receive(backup, header, payload)
    backup.receive(reader.headers()[2])[:2000] = b"x" * 2000
    backup.abort()
    assert [slot.completed_steps for slot in held(folder / "backup-0") if slot.valid] == [2]
    with pytest.raises(CheckpointError, match="no save has begun"):
        backup.commit_received(reader.headers()[2], of(b""))
    reader.close()
