"""Acts in one process as the ranks of jobs with several sizes. The meshes are real, but nothing is sent."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.testing._internal.distributed.fake_pg import FakeStore

from everstep.model.topology import Topology
from everstep.shards.file import write_shard
from everstep.shards.folders import step_folder
from everstep.slots.file import SlotFile
from everstep.slots.owner import SlotOwner
from everstep.slots.reader import SlotReader
from everstep.training.state.codec import encode

STEP = 7
Tree = dict[str, Any]


@contextmanager
def as_rank(rank: int, sizes: Mapping[str, int]) -> Iterator[DeviceMesh]:
    """Act as one rank of a job with a mesh of these sizes. Yields the mesh."""
    world = 1
    for size in sizes.values():
        world *= size
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    finally:
        dist.destroy_process_group()


def shard(whole: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """Return this rank's part of a tensor."""
    shape, offsets = compute_local_shape_and_global_offset(whole.shape, mesh, placements)
    local = whole
    for dim, (size, offset) in enumerate(zip(shape, offsets, strict=True)):
        local = local.narrow(dim, min(offset, whole.shape[dim]), size)
    return DTensor.from_local(
        local.clone(), mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def save(root: Path, rank: int, topology: Topology, tree: Tree) -> None:
    """Write a rank's state to disk through a slot, as in a job."""
    encoded = encode(tree | {"everstep.step": STEP})
    path = root / f"checkpoint-{rank}"
    file = SlotFile(path, slots=2, owner=SlotOwner("job", "", rank))
    base = file.begin(encoded.structure, encoded.layout.total_bytes)
    for tensor, spec in zip(encoded.tensors, encoded.layout.specs, strict=True):
        ctypes.memmove(base + spec.offset, tensor.contiguous().data_ptr(), spec.nbytes)
    header = file.commit(STEP)
    file.close()
    reader = SlotReader(path)
    write_shard(
        step_folder(root, "job", STEP),
        owner=reader.owner,
        topology=str(topology),
        header=header,
        read=partial(reader.read_into, header),
    )
    reader.close()
    path.unlink()


def save_all(root: Path, topology: Topology, sizes: Mapping[str, int], tree: Callable[[int, DeviceMesh], Tree]) -> Path:
    """Write the states of all ranks to disk. Returns the folder of the step."""
    root.mkdir(exist_ok=True)
    for rank in range(topology.world_size):
        with as_rank(rank, sizes) as mesh:
            save(root, rank, topology, tree(rank, mesh))
    return step_folder(root, "job", STEP)


def bits(tensor: Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    """Return a tensor's type, shape and bytes."""
    return tensor.dtype, tensor.shape, tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
