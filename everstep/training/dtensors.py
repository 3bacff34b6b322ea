"""DTensors in a checkpoint: their local shard, and what it takes to be a DTensor again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from everstep.errors import CheckpointError, CorruptCheckpoint

MeshKey = tuple[tuple[str, ...] | None, tuple[int, ...], tuple[int, ...]]
Description = tuple[MeshKey, tuple[str, ...], tuple[int, ...], tuple[int, ...]]
"""Mesh, placements, global shape and stride of a DTensor, in plain values."""

_keys: dict[int, tuple[DeviceMesh, MeshKey]] = {}


def mesh_key(mesh: DeviceMesh) -> MeshKey:
    """What makes two device meshes the same: names, ranks in order, shape."""
    known = _keys.get(id(mesh))
    if known is None:
        names = tuple(mesh.mesh_dim_names) if mesh.mesh_dim_names else None
        known = (mesh, (names, tuple(mesh.mesh.flatten().tolist()), tuple(mesh.mesh.shape)))
        _keys[id(mesh)] = known  # keeps the mesh, so that its id stays its own
    return known[1]


def meshes_of(tensors: Iterable[Tensor]) -> dict[MeshKey, DeviceMesh]:
    """The device meshes of the DTensors among some tensors."""
    return {mesh_key(tensor.device_mesh): tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor)}


def describe(tensor: DTensor) -> Description:
    """All of a DTensor but its shard."""
    placements = tuple(_text(placement) for placement in tensor.placements)
    return mesh_key(tensor.device_mesh), placements, tuple(tensor.shape), tuple(tensor.stride())


def rebuild(local: Tensor, description: Description, meshes: Mapping[MeshKey, DeviceMesh]) -> DTensor:
    """A DTensor around a local shard.

    Raises:
        CheckpointError: this process has no such mesh.
    """
    key, placements, shape, stride = description
    if key not in meshes:
        raise CheckpointError(
            f"the checkpoint holds a DTensor on the mesh {key[0]} of ranks {list(key[1])}, which no given model or "
            "optimizer uses: resume with the parallel sizes that it was saved with"
        )
    return DTensor.from_local(
        local,
        meshes[key],
        [_placement(text) for text in placements],
        run_check=False,
        shape=torch.Size(shape),
        stride=stride,
    )


def _text(placement: Placement) -> str:
    """A placement in a few letters; ``_placement`` reads it."""
    if isinstance(placement, _StridedShard):
        return f"shard {placement.dim} {placement.split_factor}"
    if isinstance(placement, Shard):
        return f"shard {placement.dim}"
    if isinstance(placement, Partial):
        return f"partial {placement.reduce_op}"
    if isinstance(placement, Replicate):
        return "replicate"
    raise CheckpointError(f"a state dict holds a DTensor placed as {placement}, which cannot be saved")


def _placement(text: str) -> Placement:
    match text.split():
        case ["shard", dim]:
            return Shard(int(dim))
        case ["shard", dim, factor]:
            return _StridedShard(int(dim), split_factor=int(factor))
        case ["partial", operation]:
            return Partial(operation)
        case ["replicate"]:
            return Replicate()
        case _:
            raise CorruptCheckpoint(f"a checkpoint's structure has an unknown placement {text!r}")
