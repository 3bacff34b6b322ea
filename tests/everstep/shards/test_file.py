"""A checkpoint on disk equals the saved state, and other libraries can read it."""

from __future__ import annotations

import os
import random
import tracemalloc
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from everstep.shards.file import open_shard, restore, write_shard
from everstep.shards.folders import held_on_disk, step_folder
from everstep.shards.manifest import read_manifest
from everstep.slots.file import SlotFile
from everstep.slots.format import aligned
from everstep.slots.owner import SlotOwner
from everstep.slots.reader import SlotReader, held
from everstep.slots.tensor_table import TensorSpec, pack_table
from tests.everstep.shards.states import DTYPES, STATE, Slot, Tensors, floats, rank_of_a_group, restore_shard


@pytest.fixture
def slot(tmp_path: Path) -> Slot:
    return Slot(tmp_path / "checkpoint-0", STATE)


@st.composite
def states(draw: st.DrawFn) -> Tensors:
    tensors = []
    for number in range(draw(st.integers(0, 6))):
        dtype = draw(st.sampled_from(sorted(DTYPES)))
        shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
        count = int(torch.Size(shape).numel()) * DTYPES[dtype]
        data = random.Random(draw(st.integers(0, 99))).randbytes(count)
        tensors.append((f"model.{number}", dtype, shape, bytes(byte & 1 for byte in data) if dtype == "bool" else data))
    return tensors


@settings(max_examples=60)
@given(states(), st.integers(0, 99))
def test_a_file_holds_the_tensors_and_gives_the_slot_back(
    tmp_path_factory: pytest.TempPathFactory, tensors: Tensors, seed: int
) -> None:
    root = tmp_path_factory.mktemp("shard")
    slot = Slot(root / "checkpoint-0", tensors, seed=seed)
    slot.write(root)
    folder = step_folder(root, "job", 7)
    loaded = load_file(folder / "rank-0.safetensors")
    for name, dtype, shape, data in tensors:
        assert loaded[name].contiguous().view(-1).view(torch.uint8).numpy().tobytes() == data
        assert tuple(loaded[name].shape) == ((*shape, DTYPES[dtype]) if dtype.startswith("complex") else shape)
        unnamed = dtype.startswith("complex") or dtype == "float8_e8m0fnu"
        assert loaded[name].dtype == (torch.uint8 if unnamed else getattr(torch, dtype))
    assert [(one.valid, one.reason) for one in held_on_disk(root, "job", verify=True)] == [(True, "")]
    again = SlotFile(root / "again", slots=2, generation=9)
    assert restore_shard(folder, 0, again) == slot.header
    assert [one.completed_steps for one in held(root / "again") if one.valid] == [7]
    payload = again.load(7)
    assert bytes(payload.tensors) == slot.payload()[: len(payload.tensors)]
    assert payload.structure == slot.structure
    again.close()


def test_types_without_a_name_are_bytes_with_the_true_type_in_the_manifest(tmp_path: Path) -> None:
    value = torch.arange(6).to(torch.complex128).reshape(2, 3)
    Slot(tmp_path / "c", [("model.c", "complex128", (2, 3), value.numpy().tobytes())]).write(tmp_path)
    folder = step_folder(tmp_path, "job", 7)
    loaded = load_file(folder / "rank-0.safetensors")["model.c"]
    assert (loaded.dtype, loaded.shape) == (torch.uint8, (2, 3, 16))
    (part,) = read_manifest(folder, 0).tensors
    assert torch.equal(loaded.view(getattr(torch, part.dtype)).reshape(part.shape), value)


def test_every_tensor_begins_at_a_multiple_of_its_element(slot: Slot, tmp_path: Path) -> None:
    manifest = slot.write(tmp_path)
    assert [part.at % 8 for part in manifest.tensors if part.dtype == "int64"] == [0]


def test_the_files_of_all_ranks_are_one_checkpoint_for_torch(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    whole = torch.arange(70, dtype=torch.float32).reshape(7, 10)
    wide = torch.arange(7).to(torch.complex128)
    for rank, rows in enumerate(
        (slice(0, 4), slice(4, 7), slice(7, 7))
    ):  # torch.chunk(3) leaves no rows for the last rank
        chunks = {"model.w": whole[rows], "model.c": wide[rows]}
        specs: list[TensorSpec] = []
        tensors: list[bytes] = []
        for name, chunk in chunks.items():
            offset = specs[-1].offset + aligned(specs[-1].nbytes) if specs else 0
            data = chunk.contiguous().numpy().tobytes()
            dtype, shape = str(chunk.dtype).removeprefix("torch."), tuple(chunk.shape)
            place = (rows.start, *([0] * (chunk.dim() - 1)))
            known = {"model.w": (7, 10), "model.c": (7,)}[name]
            specs.append(TensorSpec(name, dtype, shape, offset, len(data), "cpu", known, place))
            tensors.append(data)
        file = SlotFile(tmp_path / f"c-{rank}", slots=2, owner=SlotOwner("job", "", rank))
        end = specs[-1].offset + aligned(specs[-1].nbytes)
        file.begin(pack_table(specs), end)
        with file.tensors() as view:
            for spec, data in zip(specs, tensors, strict=True):
                view[spec.offset : spec.offset + spec.nbytes] = data
        header = file.commit(7)
        reader = SlotReader(tmp_path / f"c-{rank}")
        folder = step_folder(tmp_path, "job", 7)
        write_shard(
            folder,
            owner=file.owner,
            topology="3,1,1,1,pp-dp-tp",
            header=header,
            read=partial(reader.read_into, header),
        )
    found = {"model.w": torch.zeros(7, 10), "model.c": torch.zeros(7, 16, dtype=torch.uint8)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load(found, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    assert torch.equal(found["model.w"], whole)
    assert torch.equal(found["model.c"].view(torch.complex128).reshape(7), wide)


@pytest.mark.parametrize(
    ("rank", "topology", "chunk", "key"),
    [
        (0, "1,2,1,1,pp-dp-tp", {}, "model.w"),
        (1, "1,2,1,1,pp-dp-tp", {}, "rank-1.model.w"),
        (0, "1,2,2,1,pp-dp-tp", {}, "rank-0.model.w"),
        (0, "", {}, "rank-0.model.w"),
        (1, "1,2,1,1,pp-dp-tp", {"global_shape": (4,), "offsets": (2,)}, "model.w"),
        (1, "1,2,1,1,pp-dp-tp", {"global_shape": (2,), "offsets": (0,), "replica": True}, "rank-1.model.w"),
        (5, "1,8,2,2,pp-dp-tp", {"global_shape": (4,), "offsets": (2,), "group": 4}, "group-4.model.w"),
        (1, "1,8,2,2,pp-dp-tp", {"global_shape": (4,), "offsets": (2,), "group": 0}, "model.w"),
    ],
)
def test_names_tell_chunks_of_the_whole_from_what_is_a_ranks_own(
    tmp_path: Path, rank: int, topology: str, chunk: dict[str, Any], key: str
) -> None:
    slot = Slot(tmp_path / "c", [("model.w", "float32", (2,), floats(2))], **chunk)
    manifest = slot.write(tmp_path, rank, topology)
    assert [part.key for part in manifest.tensors] == [key]


def test_names_that_look_like_ours_stay_apart(tmp_path: Path) -> None:
    tensors: Tensors = [("a", "float32", (1,), floats(1)), ("rank-1.a", "float32", (1,), floats(1, 1))]
    slot = Slot(tmp_path / "c", tensors)
    manifest = slot.write(tmp_path, 1)
    loaded = load_file(step_folder(tmp_path, "job", 7) / "rank-1.safetensors")
    found = {part.name: loaded[part.key].numpy().tobytes() for part in manifest.tensors}
    assert found == {"a": floats(1), "rank-1.a": floats(1, 1)}


def test_files_are_on_the_disk_before_they_have_their_names(
    slot: Slot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def synced(descriptor: int) -> None:
        events.append("sync " + Path(f"/proc/self/fd/{descriptor}").readlink().name.split(".")[-1])
        fsync(descriptor)

    def renamed(self: Path, target: Path) -> Path:
        events.append("rename " + target.name)
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "rename", renamed)
    step_folder(tmp_path, "job", 7).mkdir(parents=True)
    slot.write(tmp_path)
    whole = ["sync writing", "rename rank-0.safetensors", "sync step-000000007"]
    assert events == [*whole, "sync writing", "rename rank-0.json", "sync step-000000007"]


def test_writing_takes_little_memory(tmp_path: Path) -> None:
    size = 48 << 20
    slot = Slot(tmp_path / "c", [("model.w", "uint8", (size,), bytes(size))])
    moved: list[int] = []
    tracemalloc.start()
    try:
        owner, read = slot.reader.owner, partial(slot.reader.read_into, slot.header)
        write_shard(
            step_folder(tmp_path, "job", 7), owner=owner, topology="", header=slot.header, read=read, pace=moved.append
        )
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8 << 20
    assert sum(moved) == slot.header.payload_bytes
    assert max(moved) <= 4 << 20


def test_ranks_of_a_group_share_what_is_large(tmp_path: Path) -> None:
    first, second = rank_of_a_group(tmp_path / "a", 1), rank_of_a_group(tmp_path / "b", 2)
    digests = {first.write(tmp_path, 0).digest, second.write(tmp_path, 1).digest}
    assert len(digests) == 1 and digests != {""}
    folder = step_folder(tmp_path, "job", 7)
    fetched: list[int] = []
    read_bytes: list[int] = []

    def fill(view: memoryview) -> None:
        fetched.append(len(view))
        assert first.reader.read_into(first.header, 0, view) == len(view)

    again = SlotFile(tmp_path / "again", slots=2)
    manifest = read_manifest(folder, 1)
    with open_shard(folder, 1) as read:
        header = restore(manifest, read, again, fill=fill, newest_generation=2, pace=read_bytes.append)
    assert (header.checksum, header.generation) == (second.header.checksum, 2)
    assert again.load(7).structure == second.structure
    assert bytes(again.load(7).tensors) == second.payload()[: second.header.tensor_bytes]
    assert fetched == [first.header.tensor_bytes]
    assert sum(read_bytes) < 10_000
