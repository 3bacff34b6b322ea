"""Makes states of ranks in slots. Tests write these states to disk."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from everstep.shards.file import open_shard, restore, write_shard
from everstep.shards.folders import step_folder
from everstep.shards.manifest import Manifest, read_manifest
from everstep.slots.checksum import PayloadChecksum
from everstep.slots.file import SlotFile
from everstep.slots.format import SlotHeader, aligned
from everstep.slots.owner import SlotOwner
from everstep.slots.reader import SlotReader
from everstep.slots.tensor_table import TensorSpec, pack_table

DTYPES = {
    "float32": 4,
    "float64": 8,
    "bfloat16": 2,
    "int64": 8,
    "uint16": 2,
    "bool": 1,
    "float8_e4m3fn": 1,
    "float8_e8m0fnu": 1,
    "complex64": 8,
    "complex128": 16,
}

Tensors = list[tuple[str, str, tuple[int, ...], bytes]]


class Slot:
    """The saved state of one rank."""

    def __init__(self, path: Path, tensors: Tensors, *, step: int = 7, seed: int = 0, **chunk: Any) -> None:
        specs, end = [], 0
        for name, dtype, shape, data in tensors:
            specs.append(TensorSpec(name, dtype, shape, end, len(data), "cpu", **chunk))
            end += aligned(len(data))
        self.path, self.step = path, step
        self.structure = pack_table(specs) + b"the tree"
        file = SlotFile(path, slots=2, generation=3)
        file.begin(self.structure, end)
        with file.tensors() as view:
            # The bytes between tensors are whatever was there before.
            view[:] = random.Random(seed).randbytes(end)
            for spec, (_, _, _, data) in zip(specs, tensors, strict=True):
                view[spec.offset : spec.offset + spec.nbytes] = data
        self.header: SlotHeader = file.commit(step)
        file.close()
        self.reader = SlotReader(path)

    def payload(self) -> bytes:
        found = bytearray(self.header.payload_bytes)
        assert self.reader.read_into(self.header, 0, memoryview(found)) == len(found)
        return bytes(found)

    def write(
        self, root: Path, rank: int = 0, topology: str = "1,1,1,1,pp-dp-tp", *, run: str = "", **options: Any
    ) -> Manifest:
        """Write the state to disk as that of any rank."""
        folder = step_folder(root, "job", self.step)
        owner = SlotOwner("job", run, rank)
        checksum = PayloadChecksum()
        checksum.update(self.payload())
        header = replace(self.header, checksum=checksum.value(owner, self.step))
        read = partial(self.reader.read_into, self.header)
        return write_shard(folder, owner=owner, topology=topology, header=header, read=read, **options)


def floats(count: int, seed: int = 0) -> bytes:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, generator=generator).numpy().tobytes()


STATE: Tensors = [
    ("model.weight", "float32", (64, 100), floats(6400)),
    ("model.mask", "bool", (3,), b"\1\0\1"),
    ("optimizer.state.0.step", "float32", (), floats(1)),
    ("model.nothing", "float32", (0, 4), b""),
    ("model.positions", "int64", (2,), (5).to_bytes(8, "little") + (6).to_bytes(8, "little")),
]


def names(root: Path) -> list[str]:
    return sorted(path.name for path in step_folder(root, "job", 7).iterdir())


def rank_of_a_group(path: Path, seed: int) -> Slot:
    """Return a state. It has the parameters of the group, and the random state of the rank."""
    own = random.Random(seed).randbytes(5056)
    tensors = [("model.w", "float32", (100, 100), floats(10_000)), ("everstep.rng.torch", "uint8", (5056,), own)]
    return Slot(path, tensors, seed=seed)


def restore_shard(folder: Path, rank: int, slot_file: SlotFile) -> SlotHeader:
    """Restore the state of a file into a slot."""
    with open_shard(folder, rank) as read:
        return restore(read_manifest(folder, rank), read, slot_file)
