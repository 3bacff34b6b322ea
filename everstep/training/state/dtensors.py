"""Describes DTensors in a checkpoint, and makes DTensors from their local shards again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from everstep.errors import CheckpointError, CorruptCheckpoint

MeshKey = tuple[tuple[str, ...] | None, tuple[int, ...], tuple[int, ...]]
Description = tuple[MeshKey, tuple[str, ...], tuple[int, ...], tuple[int, ...]]
"""Mesh, placements, global shape and stride of a DTensor, in plain values."""

_keys: dict[int, tuple[DeviceMesh, MeshKey]] = {}


def mesh_key(mesh: DeviceMesh) -> MeshKey:
    """The key of a device mesh: names, ranks in order, shape. Equal meshes have equal keys."""
    cached = _keys.get(id(mesh))
    if cached is None:
        names = tuple(mesh.mesh_dim_names) if mesh.mesh_dim_names else None
        cached = (mesh, (names, tuple(mesh.mesh.flatten().tolist()), tuple(mesh.mesh.shape)))
        _keys[id(mesh)] = cached  # keeps the mesh alive, so that no other object gets its id
    return cached[1]


def meshes_of(tensors: Iterable[Tensor]) -> dict[MeshKey, DeviceMesh]:
    """The device meshes of the DTensors among some tensors."""
    return {mesh_key(tensor.device_mesh): tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor)}


def describe(tensor: DTensor) -> Description:
    """The description of a DTensor without the data of its shard."""
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
            f"the checkpoint has a DTensor on the mesh {key[0]} of ranks {list(key[1])}, which no model or optimizer "
            "of the script uses: resume with the parallel sizes with which it was saved"
        )
    return DTensor.from_local(
        local,
        meshes[key],
        [_placement(text) for text in placements],
        run_check=False,
        shape=torch.Size(shape),
        stride=stride,
    )


def chunk_of(tensor: DTensor) -> dict[str, Any]:
    """The part of a DTensor that this rank has, as fields of ``TensorSpec``.

    Returns:
        ``global_shape`` and ``offsets``; ``replica`` only if another rank has the same chunk and saves it; ``group``
        only if the mesh does not have all ranks of the job. Empty if the local shard is not a chunk of the complete
        tensor, e.g. for partial sums and for strided shards of several pieces.
    """
    mesh, placements = tensor.device_mesh, tensor.placements
    coordinate = mesh.get_coordinate()
    if coordinate is None or any(isinstance(placement, Partial) for placement in placements):
        return {}
    if not _in_one_piece(tensor, coordinate):
        return {}
    _, offsets = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    chunk: dict[str, Any] = {"global_shape": list(tensor.shape), "offsets": list(offsets)}
    if any(
        isinstance(placement, Replicate) and position
        for placement, position in zip(placements, coordinate, strict=True)
    ):
        chunk["replica"] = True
    ranks = mesh_key(mesh)[1]
    if len(ranks) < dist.get_world_size():
        chunk["group"] = min(ranks)
    return chunk


def matching(
    name: str, description: Description, meshes: Mapping[MeshKey, DeviceMesh]
) -> tuple[DeviceMesh, list[Placement]]:
    """The mesh and the placements of this process that correspond to those of a saved tensor.

    The mesh has the same dimensions, which may have other sizes.

    Args:
        name: The tensor's name, for messages.
        description: The description of the saved tensor, from ``describe``.
        meshes: The meshes of this process, by ``mesh_key``.

    Raises:
        CheckpointError: there is no such mesh, or more than one, or the tensor cannot be placed there as it was.
    """
    (names, _, sizes), texts, _, _ = description
    fitting = {
        key: mesh
        for key, mesh in meshes.items()
        if key[0] == names and (names is not None or len(key[2]) == len(sizes))
    }
    if len(fitting) != 1:
        raise CheckpointError(
            f"{name} was saved on a mesh with the dimensions {', '.join(names or ('without names',))}: "
            f"the script's models and optimizers use {len(fitting) or 'no'} such meshes, but exactly one is needed"
        )
    (mesh,) = fitting.values()
    placements = [_placement(text) for text in texts]
    for axis, placement in enumerate(placements):
        if not isinstance(placement, _StridedShard):
            continue
        # The split factor is the number of shards that later dimensions make, e.g. tensor parallelism under FSDP2.
        later = [other for other in range(axis + 1, len(sizes)) if placements[other] == Shard(placement.dim)]
        if placement.split_factor != prod(sizes[other] for other in later):
            raise CheckpointError(f"{name} is placed as {texts}, and so can be read with the same sizes only")
        factor = prod(mesh.size(other) for other in later)
        placements[axis] = _StridedShard(placement.dim, split_factor=factor) if factor > 1 else Shard(placement.dim)
    return mesh, placements


def on_mesh(shape: Sequence[int], dtype: torch.dtype, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """A DTensor of zeros.

    Raises:
        CheckpointError: this rank's shard would consist of several pieces.
    """
    local_shape, _ = compute_local_shape_and_global_offset(torch.Size(shape), mesh, placements)
    dtensor = DTensor.from_local(
        torch.zeros(local_shape, dtype=dtype, device=mesh.device_type),
        mesh,
        placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=torch.empty(shape, device="meta").stride(),
    )
    coordinate = mesh.get_coordinate()
    if coordinate is None or not _in_one_piece(dtensor, coordinate):
        raise CheckpointError(
            f"a tensor of {list(shape)} cannot be split over the mesh {mesh.mesh_dim_names} of sizes "
            f"{list(mesh.mesh.shape)} in one piece for each rank: use sizes that divide it"
        )
    return dtensor


def _in_one_piece(tensor: DTensor, coordinate: Sequence[int]) -> bool:
    """Whether the local shard is one box of the complete tensor; a strided shard may consist of several boxes."""
    mesh = tensor.device_mesh
    strided = {placement.dim for placement in tensor.placements if isinstance(placement, _StridedShard)}
    for dim in strided:
        rows = torch.arange(tensor.shape[dim])
        for axis, placement in enumerate(tensor.placements):
            if isinstance(placement, _StridedShard) and placement.dim == dim:
                along: Shard | _StridedShard = _StridedShard(0, split_factor=placement.split_factor)
            elif isinstance(placement, Shard) and placement.dim == dim:
                along = Shard(0)
            else:
                continue
            shards, _ = along._split_tensor(rows, mesh.size(axis), with_padding=False, contiguous=False)
            rows = shards[coordinate[axis]]
        if rows.numel() and int(rows[-1] - rows[0]) != rows.numel() - 1:
            return False
    return True


def _text(placement: Placement) -> str:
    """A placement as a short text, which ``_placement`` reads."""
    if isinstance(placement, _StridedShard):
        return f"shard {placement.dim} {placement.split_factor}"
    if isinstance(placement, Shard):
        return f"shard {placement.dim}"
    if isinstance(placement, Partial):
        return f"partial {placement.reduce_op}"
    if isinstance(placement, Replicate):
        return "replicate"
    raise CheckpointError(f"a state dict has a DTensor placed as {placement}, which cannot be saved")


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
