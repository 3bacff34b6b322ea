"""Checkpoints on disk. A damaged or incomplete file never counts as a copy."""

from __future__ import annotations

import errno
import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.errors import CheckpointError, CorruptCheckpoint
from everstep.shards import file as shard_file
from everstep.shards.file import open_shard, restore, write_shard
from everstep.shards.folders import held_on_disk, manifests, step_folder
from everstep.shards.manifest import Piece
from everstep.slots.file import SlotFile
from everstep.slots.reader import SlotReader, held
from everstep.slots.tensor_table import TensorSpec, pack_table, split
from tests.everstep.shards.states import STATE, Slot, names, rank_of_a_group, restore_shard
from tests.everstep.slots.saved import payload_at


@pytest.fixture
def slot(tmp_path: Path) -> Slot:
    return Slot(tmp_path / "checkpoint-0", STATE)


def test_a_slot_that_is_overwritten_meanwhile_never_becomes_a_file(slot: Slot, tmp_path: Path) -> None:
    reads = 0

    def read(offset: int, buffer: memoryview) -> int:
        nonlocal reads
        reads += 1
        if reads == 3:  # the structure and the first tensor were read
            with slot.path.open("r+b") as file:
                file.seek(payload_at(slot.path, 7) + 25600)
                file.write(b"\xff")
        return slot.reader.read_into(slot.header, offset, buffer)

    with pytest.raises(CorruptCheckpoint, match="state after step 7 was overwritten"):
        write_shard(
            step_folder(tmp_path, "job", 7),
            owner=slot.reader.owner,
            topology="",
            header=slot.header,
            read=read,
        )
    assert names(tmp_path) == []


def test_a_slot_that_was_overwritten_with_another_step_is_refused(slot: Slot, tmp_path: Path) -> None:
    with pytest.raises(CorruptCheckpoint, match="state after step 7 was overwritten"):
        write_shard(
            step_folder(tmp_path, "job", 7),
            owner=slot.reader.owner,
            topology="",
            header=slot.header,
            read=lambda _offset, _buffer: 0,
        )
    assert held_on_disk(tmp_path, "job") == []


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("where", ["head", "tensor", "padding", "structure"])
def test_a_flipped_bit_is_found_wherever_it_is(slot: Slot, tmp_path: Path, where: str) -> None:
    manifest = slot.write(tmp_path)
    folder = step_folder(tmp_path, "job", 7)
    places = {
        "head": manifest.head.at + 20,
        "tensor": manifest.tensors[0].at + 100,
        "padding": manifest.padding.at,
        "structure": manifest.structure.at + 9,
    }
    flip(folder / "rank-0.safetensors", places[where])
    (found,) = held_on_disk(tmp_path, "job", verify=True)
    assert not found.valid
    assert "rank-0.safetensors: the contents do not match their checksum" in found.reason
    assert [one.valid for one in held_on_disk(tmp_path, "job")] == [True]  # without ``verify`` only sizes are checked
    again = SlotFile(tmp_path / "again", slots=2)
    if where == "head":  # the head is not used to fill a slot
        restore_shard(folder, 0, again)
        return
    with pytest.raises(CorruptCheckpoint, match="does not match its checksum"):
        restore_shard(folder, 0, again)
    assert not [one for one in held(tmp_path / "again") if one.valid]


def test_a_truncated_file_is_found_by_its_size(slot: Slot, tmp_path: Path) -> None:
    manifest = slot.write(tmp_path)
    folder = step_folder(tmp_path, "job", 7)
    os.truncate(folder / "rank-0.safetensors", manifest.bytes - 1)
    (found,) = held_on_disk(tmp_path, "job")
    assert not found.valid
    assert f"has {manifest.bytes - 1} of {manifest.bytes} bytes" in found.reason
    again = SlotFile(tmp_path / "again", slots=2)
    with pytest.raises(CorruptCheckpoint, match="the file ends at byte"):
        restore_shard(folder, 0, again)
    assert not [one for one in held(tmp_path / "again") if one.valid]


@settings(max_examples=80)
@given(st.data())
def test_a_damaged_manifest_gives_a_reason(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    root = tmp_path_factory.mktemp("shard")
    Slot(root / "c", STATE).write(root)
    path = step_folder(root, "job", 7) / "rank-0.json"
    text = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(text) - 1))
    if data.draw(st.booleans()):
        text[at] ^= 1 << data.draw(st.integers(0, 7))
    else:
        del text[at:]
    path.write_bytes(text)
    (found,) = held_on_disk(root, "job")
    assert not found.valid
    assert str(path) in found.reason
    assert manifests(path.parent) == {}


@pytest.mark.parametrize(
    "change",
    [
        {"padding": Piece(at=0, nbytes=1 << 50)},
        {"padding": Piece(at=0, nbytes=0, xxh3=xxhash.xxh3_64_hexdigest(b""))},
        {"structure": Piece(at=0, nbytes=1 << 50)},
        {"tensor_bytes": 1 << 62},
        {"step": 1 << 63},
        {"saved_ns": -1},
        {"generation": -1},
    ],
)
def test_a_forged_manifest_is_a_damaged_copy(slot: Slot, tmp_path: Path, change: dict[str, object]) -> None:
    made_up = slot.write(tmp_path).model_copy(update=change)
    path = step_folder(tmp_path, "job", 7) / "rank-0.json"
    path.write_text(made_up.to_json())
    with pytest.raises(CorruptCheckpoint):
        restore_shard(path.parent, 0, SlotFile(tmp_path / "again", slots=2))


def test_a_missing_file_is_named(slot: Slot, tmp_path: Path) -> None:
    assert held_on_disk(tmp_path, "other") == []
    slot.write(tmp_path)
    folder = step_folder(tmp_path, "job", 7)
    (folder / "rank-0.json").rename(folder / "kept")
    (found,) = held_on_disk(tmp_path, "job")
    assert (found.rank, found.completed_steps, found.valid) == (0, 7, False)
    assert "rank-0.json cannot be read: No such file" in found.reason
    (folder / "kept").rename(folder / "rank-0.json")
    (folder / "rank-0.safetensors").unlink()
    (found,) = held_on_disk(tmp_path, "job")
    assert "rank-0.safetensors cannot be read: No such file" in found.reason
    with pytest.raises(CheckpointError, match="No such file"):
        restore_shard(folder, 0, SlotFile(tmp_path / "again"))


def test_a_folder_with_the_label_of_another_step_is_found(slot: Slot, tmp_path: Path) -> None:
    slot.write(tmp_path)
    step_folder(tmp_path, "job", 7).rename(step_folder(tmp_path, "job", 8))
    (found,) = held_on_disk(tmp_path, "job")
    assert (found.completed_steps, found.valid) == (8, False)
    assert "holds the state after step 7" in found.reason


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Limit the size of files, so that writes fail as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("reserves", [True, False])
def test_a_full_disk_is_an_error_and_leaves_no_file(
    slot: Slot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reserves: bool
) -> None:
    def cannot(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "not here")

    if not reserves:
        monkeypatch.setattr(os, "posix_fallocate", cannot)
    with (
        largest_file(20_000),
        pytest.raises(
            CheckpointError, match=r"no room for rank-0.safetensors of 0.0 MB in .*step-000000007: [\d.]+ [MG]B"
        ),
    ):
        slot.write(tmp_path)
    assert names(tmp_path) == []
    slot.write(tmp_path)
    assert names(tmp_path) == ["rank-0.json", "rank-0.safetensors"]


def test_a_kill_during_a_write_leaves_no_copy_and_the_next_write_removes_the_rest(slot: Slot, tmp_path: Path) -> None:
    def die(_: int) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if not child:
        slot.write(tmp_path, pace=die)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    (left,) = names(tmp_path)
    assert left.endswith(".writing")
    assert held_on_disk(tmp_path, "job") == []
    slot.write(tmp_path)
    assert names(tmp_path) == ["rank-0.json", "rank-0.safetensors"]


def test_an_interrupted_write_leaves_no_file(slot: Slot, tmp_path: Path) -> None:
    def stop(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        slot.write(tmp_path, pace=stop)
    assert names(tmp_path) == []


def test_an_older_manifest_never_exists_beside_a_newer_file(
    slot: Slot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot.write(tmp_path)
    other = Slot(tmp_path / "other", [(n, d, s, bytes(len(data))) for n, d, s, data in STATE])

    def dies(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(shard_file, "replace_file", dies)
        with pytest.raises(KeyboardInterrupt):
            other.write(tmp_path)
    (found,) = held_on_disk(tmp_path, "job")
    assert not found.valid
    assert "rank-0.json cannot be read" in found.reason


def test_tensors_from_another_rank_are_verified(tmp_path: Path) -> None:
    slot = rank_of_a_group(tmp_path / "a", 1)
    manifest = slot.write(tmp_path)
    again = SlotFile(tmp_path / "again", slots=2)

    def fill(view: memoryview) -> None:
        view[:] = bytes(len(view))

    with (
        open_shard(step_folder(tmp_path, "job", 7), 0) as read,
        pytest.raises(CorruptCheckpoint, match=r"the tensor model\.w from another rank does not match the manifest"),
    ):
        restore(manifest, read, again, fill=fill)
    assert not [one for one in held(tmp_path / "again") if one.valid]


@pytest.mark.parametrize(
    "change",
    [
        lambda spec: spec._replace(offset=1 << 20),
        lambda spec: spec._replace(nbytes=8),
        lambda spec: spec._replace(dtype="float1000"),
        lambda spec: spec._replace(shape=(-1,)),
        lambda spec: spec._replace(global_shape=(4, 4), offsets=(0,)),
    ],
)
def test_an_invalid_table_of_tensors_is_refused(tmp_path: Path, change: Callable[[TensorSpec], TensorSpec]) -> None:
    good = Slot(tmp_path / "good", STATE)
    specs, _, tree = split(good.structure)
    specs[0] = change(specs[0])
    structure = pack_table(specs) + tree
    file = SlotFile(tmp_path / "bad", slots=2)
    file.begin(structure, good.header.tensor_bytes)
    header = file.commit(7)
    reader = SlotReader(tmp_path / "bad")
    with pytest.raises(CheckpointError):
        write_shard(
            step_folder(tmp_path, "job", 7),
            owner=reader.owner,
            topology="",
            header=header,
            read=partial(reader.read_into, header),
        )
    assert held_on_disk(tmp_path, "job") == []
