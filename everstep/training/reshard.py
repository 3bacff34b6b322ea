"""Reads a checkpoint on disk that was saved with other parallel sizes.

Every rank reads the tree of containers and numbers, and the plain tensors, from the file of its *source*. The source is
the rank of the old job with the same tensor- and pipeline-parallel indices, and with this rank's data-parallel index
modulo the old size. DTensors are made on the mesh with the same dimension names, with the same placements. Torch's
distributed checkpoint then reads the chunks that this rank needs from the files of all old ranks.

A rank whose coordinate existed in the old job gets the random number generators of its source. A new rank also gets
them if all ranks of the source's data-parallel group had equal generators, since the script may rely on equal
generators. Otherwise the generators of a new rank are seeded from the source's generators and the rank's number, so
that no two ranks draw equal numbers.
"""

from __future__ import annotations

import mmap
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from everstep.errors import CheckpointError, CorruptCheckpoint, EverstepError
from everstep.model.topology import Topology
from everstep.shards.file import open_shard, read_piece, verify_piece
from everstep.shards.folders import held_in, step_of
from everstep.shards.manifest import Manifest, Part, Piece, data_name, read_manifest
from everstep.shards.safetensors_layout import whole_key
from everstep.slots.tensor_table import split
from everstep.training.rng import reseeded
from everstep.training.state.codec import decode
from everstep.training.state.dtensors import Description, MeshKey, matching, on_mesh
from everstep.training.state.layout import dtype_of

RNG = "everstep.rng"


def read_resharded(
    folder: Path, topology: Topology, rank: int, meshes: Mapping[MeshKey, DeviceMesh]
) -> tuple[int, Any]:
    """Read the state of one rank from a checkpoint with other sizes.

    Args:
        folder: A ``step-…`` folder with the files of all ranks of the old job.
        topology: The topology of the current job.
        rank: This rank.
        meshes: Device meshes of this process by ``dtensors.mesh_key``.

    Returns:
        The number of completed steps, and the tree of state dicts.

    Raises:
        CheckpointError: a file is missing, or the state cannot be mapped to these sizes.
        CorruptCheckpoint: a file that is needed is damaged.
    """
    old = OldCheckpoint(folder)
    source = old.source(topology, rank)
    reader = _Reader(old, source, meshes)
    tree = reader.tree()
    reader.fill_dtensors()
    if isinstance(tree, dict) and RNG in tree and old.must_reseed(topology, rank, source):
        tree[RNG] = reseeded(tree[RNG], rank)
    return old.step, tree


def _model_axes(topology: Topology) -> list[tuple[str, int]]:
    """The axes that divide the model, sorted by name: axes of more than one rank that are not data parallel."""
    return sorted((axis, size) for axis, size in topology.mesh if size > 1 and axis not in topology.data_axes)


def _same_axes(topology: Topology, old: Topology) -> dict[str, str]:
    """Old axis → the new axis that corresponds to it; empty: it is not clear which axes correspond.

    Axes of one rank may be added or left out, and a single data-parallel axis may change its name.
    """
    wide = {axis for axis, size in topology.mesh if size > 1} - set(old.axes)
    same = {axis: axis for axis in old.axes if axis in topology.axes}
    if wide and len(topology.data_axes) == len(old.data_axes) == 1 and wide == {*topology.data_axes}:
        return same | {old.data_axes[0]: topology.data_axes[0]}
    gone = {axis for axis, size in old.mesh if size > 1} - set(same)
    return {} if wide or gone else same


def _counterparts(topology: Topology, old: Topology) -> list[int] | None:
    """For each rank, the old rank with the same coordinate; data-parallel indices are taken modulo the old sizes.

    None: some rank has no such old rank, or has another position in a laid group. The answer is for all ranks together,
    so that no two ranks share a source by chance.
    """
    same = _same_axes(topology, old)
    if not same or _model_axes(topology) != _model_axes(old):
        return None
    sizes = [(axis, size) for axis, size in old.mesh if axis in same]
    coordinates = map(topology.coordinate, range(topology.world_size))
    sources = [old.rank_at(**{axis: at[same[axis]] % size for axis, size in sizes}) for at in coordinates]
    for kind in {laid.name for laid in (*topology.laid, *old.laid)}:
        if kind not in topology.kinds or kind not in old.kinds:
            return None
        now, before = _in_groups(topology, kind), _in_groups(old, kind)
        if any(now[rank] != before[source] for rank, source in enumerate(sources)):
            return None
    return sources


def _in_groups(topology: Topology, kind: str) -> dict[int, tuple[int, int]]:
    """Rank → the size of its group of a kind, and its position in the group."""
    return {rank: (len(group), at) for group in topology.groups(kind) for at, rank in enumerate(group)}


class OldCheckpoint:
    """The manifests of all ranks of a checkpoint on disk.

    Raises:
        CheckpointError: it is incomplete, or its sizes are not known.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        step = step_of(folder)
        if step is None or not folder.is_dir():
            raise CheckpointError(f"{folder} is not a folder of a checkpoint: its name must be like step-000000120")
        self.step = step
        manifests = sorted(folder.glob("rank-*.json"))
        if not manifests:
            raise CheckpointError(f"{folder} has no checkpoint: there is no rank-<r>.json")
        first = read_manifest(folder, int(manifests[0].stem.removeprefix("rank-")))
        if not first.topology:
            raise CheckpointError(f"{folder} was saved by a job of unknown sizes, so it can be read with the same only")
        self.topology = Topology.parse(first.topology)
        """Sizes of the job that saved it."""
        copies = [held_in(folder, step, rank) for rank in range(self.topology.world_size)]
        if bad := [copy for copy in copies if not copy.valid]:
            raise CheckpointError(
                f"{folder} is not complete, rank {bad[0].rank} of {self.topology.world_size} is missing or damaged: "
                f"{bad[0].reason}. Bring the files of all ranks into one folder"
            )
        self.manifests = [read_manifest(folder, rank) for rank in range(self.topology.world_size)]
        for manifest in self.manifests:
            if (manifest.job, manifest.topology) != (first.job, first.topology):
                raise CheckpointError(
                    f"{folder} mixes files of {first.job} ({first.topology}) and {manifest.job} ({manifest.topology})"
                )
        names = {data_name(manifest.rank) for manifest in self.manifests}
        if foreign := sorted({path.name for path in folder.glob("*.safetensors")} - names):
            raise CheckpointError(f"{folder} has {foreign[0]}, which does not belong to this checkpoint: remove it")

    def source(self, topology: Topology, rank: int) -> int:
        """The source of a rank.

        Raises:
            CheckpointError: it has no source, since the sizes do not fit.
        """
        if counterparts := _counterparts(topology, self.topology):
            return counterparts[rank]
        if reason := self._differs():
            raise CheckpointError(
                f"{self.folder} was saved with {self.topology.text} and cannot be read with {topology.text}: {reason}. "
                "Start with the old sizes; those of data-parallel axes may change"
            )
        return rank % self.topology.world_size

    def must_reseed(self, topology: Topology, rank: int, source: int) -> bool:
        """Whether the generators of a rank have to be seeded again."""
        if _counterparts(topology, self.topology):
            at, same = topology.coordinate(rank), _same_axes(topology, self.topology)
            existed = all(at[same[axis]] < size for axis, size in self.topology.mesh if axis in same)
            group: Sequence[int] = self.topology.along(source, self.topology.data_axes)
        else:
            existed, group = rank < self.topology.world_size, range(self.topology.world_size)
        states = {
            tuple(part.xxh3 for part in self.manifests[old_rank].tensors if part.name.startswith(f"{RNG}."))
            for old_rank in group
        }
        return not existed and len(states) > 1

    def _differs(self) -> str:
        """Why the states of the old ranks are not interchangeable; empty: they differ only in DTensors and
        generators."""
        first = {part.name: part for part in self.manifests[0].tensors}
        for manifest in self.manifests:
            parts = {part.name: part for part in manifest.tensors}
            if other := sorted(parts.keys() ^ first.keys()):
                return f"{other[0]} is not in the states of all ranks"
            for name, part in parts.items():
                if part.global_shape is not None:
                    if part.group is not None:
                        return f"{name} is a DTensor on a mesh of some ranks only"
                elif not name.startswith(f"{RNG}.") and part.xxh3 != first[name].xxh3:
                    return (
                        f"{name} is not a DTensor, and differs between ranks {self.manifests[0].rank} and "
                        f"{manifest.rank}"
                    )
        return ""


class _Reader:
    """Reads the new state of one rank."""

    def __init__(self, old: OldCheckpoint, source: int, meshes: Mapping[MeshKey, DeviceMesh]) -> None:
        self._old = old
        self._manifest: Manifest = old.manifests[source]
        self._meshes = meshes
        self._dtensors: dict[str, DTensor] = {}
        """Name in the files → the DTensor that torch has to read."""
        self._made: dict[str, DTensor] = {}
        """Name in the state → the DTensor; tensors that were saved once share it."""

    def tree(self) -> Any:
        """The tree of the source with its plain tensors, and with DTensors that are not filled yet."""
        manifest, folder = self._manifest, self._old.folder
        structure = bytearray(manifest.structure.nbytes)
        # The ranges of the DTensors' shards are never touched, so they use no memory.
        size = max(manifest.tensor_bytes, 1)
        memory = memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        try:
            with open_shard(folder, manifest.rank) as read:
                read_piece(read, manifest.structure, memoryview(structure), "the structure")
                names = [spec.name for spec in split(memoryview(structure)).specs]
                parts = {part.name: part for part in manifest.tensors}
                for part in manifest.tensors:
                    if part.global_shape is None:
                        view = memory[part.offset : part.offset + part.nbytes]
                        read_piece(read, part, view, f"the tensor {part.name}")

            def make_dtensor(index: int, description: Description) -> Tensor:
                return self._dtensor(parts[names[index]], description)

            return decode(bytes(structure), memory, self._meshes, make_dtensor)
        except CorruptCheckpoint as error:
            raise CorruptCheckpoint(f"{folder / data_name(manifest.rank)}: {error}") from error
        except EverstepError:
            raise
        except Exception as error:
            raise CorruptCheckpoint(
                f"{folder / data_name(manifest.rank)}: the state's structure cannot be read: {error}"
            ) from error

    def fill_dtensors(self) -> None:
        """Verify the chunks that this rank needs, and let torch read them into the DTensors."""
        if not self._dtensors:
            return
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
        from torch.distributed.checkpoint.state_dict_loader import load

        self._verify()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch warns that it reads without the other ranks
            load(dict(self._dtensors), storage_reader=HuggingFaceStorageReader(str(self._old.folder)), no_dist=True)

    def _dtensor(self, part: Part, description: Description) -> Tensor:
        """A DTensor on this rank's mesh; its shard is empty until ``fill_dtensors``."""
        if part.global_shape is None:
            raise CheckpointError(
                f"{part.name} was saved as partial sums or in several pieces: it can be read with the same sizes only"
            )
        if (made := self._made.get(part.name)) is not None:
            return made
        dtype = dtype_of(part.dtype)
        mesh, placements = matching(part.name, description, self._meshes)
        stored = dtype if part.stored != "U8" else torch.uint8
        shape = (*part.global_shape, part.width) if part.width > 1 else part.global_shape
        raw = on_mesh(shape, stored, mesh, placements)
        self._dtensors[whole_key(part)] = raw
        self._made[part.name] = raw if stored == dtype else self._viewed(raw, part, dtype)
        return self._made[part.name]

    def _viewed(self, raw: DTensor, part: Part, dtype: torch.dtype) -> DTensor:
        """A DTensor of a type that files do not have, as a view of the bytes that torch reads."""
        local = raw._local_tensor.view(dtype)
        mesh, placements = raw.device_mesh, raw.placements
        assert part.global_shape is not None
        return DTensor.from_local(
            local.view(local.shape[: len(part.global_shape)]),
            mesh,
            placements,
            run_check=False,
            shape=torch.Size(part.global_shape),
            stride=torch.empty(part.global_shape, device="meta").stride(),
        )

    def _verify(self) -> None:
        """Verify that the chunks which this rank needs are complete and intact, since torch does not check that."""
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        missing = {}
        boxes = {}
        for key, dtensor in self._dtensors.items():
            boxes[key] = compute_local_shape_and_global_offset(dtensor.shape, dtensor.device_mesh, dtensor.placements)
            missing[key] = dtensor._local_tensor.numel()
        for manifest in self._old.manifests:
            needed = []
            for part in manifest.tensors:
                if part.global_shape is None or part.replica or part.key not in boxes:
                    continue
                if common := _common(boxes[part.key], (part.stored_shape(), part.stored_offsets())):
                    missing[part.key] -= common
                    needed.append(part)
            if not needed:
                continue
            path = self._old.folder / data_name(manifest.rank)
            with open_shard(self._old.folder, manifest.rank) as read:
                pieces: list[tuple[Part | Piece, str]] = [(part, f"the tensor {part.name}") for part in needed]
                for piece, name in [(manifest.head, "the header"), *pieces]:
                    if reason := verify_piece(piece, read):
                        raise CorruptCheckpoint(f"{path}, {name}: {reason}")
        if incomplete := sorted(key for key, count in missing.items() if count):
            raise CheckpointError(f"{self._old.folder} does not have all of the tensor {incomplete[0]}")


def _common(box: tuple[Sequence[int], Sequence[int]], other_box: tuple[Sequence[int], Sequence[int]]) -> int:
    """Number of elements that two boxes have in common; a box is a shape and the index at which it begins."""
    count = 1
    for size, begin, other_size, other_begin in zip(*box, *other_box, strict=True):
        count *= max(0, min(begin + size, other_begin + other_size) - max(begin, other_begin))
    return count
