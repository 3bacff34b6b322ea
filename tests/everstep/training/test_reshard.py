"""Reading a checkpoint of a job with other sizes. Each rank gets its part of the state, bit for bit, or an error."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from everstep.errors import CheckpointError
from everstep.model.topology import Topology
from everstep.shards.manifest import read_manifest
from everstep.training.reshard import OldCheckpoint, read_resharded
from everstep.training.rng import RandomState
from everstep.training.state.dtensors import meshes_of, on_mesh
from tests.everstep.training.old_jobs import STEP, Tree, as_rank, bits, save_all, shard


def wide(dp: int, tp: int = 1, pp: int = 1) -> Topology:
    return Topology.of(1, dp * tp * pp, tp, pp)


def read(folder: Path, rank: int, topology: Topology, mesh: DeviceMesh) -> Tree:
    """Return the state that a rank reads, if its model is on ``mesh``."""
    model = on_mesh((4,), torch.float32, mesh, [Replicate()] * mesh.ndim)
    step, tree = read_resharded(folder, topology, rank, meshes_of([model]))
    assert step == tree["everstep.step"] == STEP
    assert isinstance(tree, dict)
    return tree


def whole_tensor(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return values.to(dtype)


DTYPES = [torch.float32, torch.bfloat16, torch.complex128, torch.complex64, torch.int64, torch.float8_e8m0fnu]


@settings(max_examples=25)
@given(
    old=st.integers(1, 4),
    new=st.integers(1, 4),
    shapes=st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple), min_size=1, max_size=3),
    data=st.data(),
)
def test_every_rank_gets_its_part_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory, old: int, new: int, shapes: list[tuple[int, ...]], data: st.DataObject
) -> None:
    wholes = {
        f"{number}": (
            whole_tensor(number, shape, data.draw(st.sampled_from(DTYPES))),
            [data.draw(st.sampled_from([Replicate(), *map(Shard, range(len(shape)))]))],
        )
        for number, shape in enumerate(shapes)
    }

    def tree(rank: int, mesh: DeviceMesh) -> Tree:
        return {"model": {name: shard(whole, mesh, at) for name, (whole, at) in wholes.items()}, "rank": rank}

    folder = save_all(tmp_path_factory.mktemp("root"), wide(old), {"dp": old}, tree)
    for rank in range(new):
        with as_rank(rank, {"dp": new}) as mesh:
            found = read(folder, rank, wide(new), mesh)
            assert found["rank"] == rank % old
            for name, (whole, at) in wholes.items():
                tensor = found["model"][name]
                assert isinstance(tensor, DTensor)
                assert (tensor.device_mesh, tensor.shape, tensor.placements) == (mesh, whole.shape, tuple(at))
                assert bits(tensor._local_tensor) == bits(shard(whole, mesh, at)._local_tensor)


@pytest.mark.parametrize(("old", "new"), [((2, 2), (1, 2)), ((1, 3), (2, 2)), ((2, 1), (1, 4))])
def test_replicas_are_read_once(tmp_path: Path, old: tuple[int, int], new: tuple[int, int]) -> None:
    whole, at = whole_tensor(0, (10, 3), torch.float32), [Replicate(), Shard(0)]

    def sizes(shape: tuple[int, int]) -> dict[str, int]:
        return {"replicas": shape[0], "shards": shape[1]}

    folder = save_all(
        tmp_path, wide(old[0] * old[1]), sizes(old), lambda _, mesh: {"model": {"w": shard(whole, mesh, at)}}
    )
    for rank in range(new[0] * new[1]):
        with as_rank(rank, sizes(new)) as mesh:
            tensor = read(folder, rank, wide(new[0] * new[1]), mesh)["model"]["w"]
            assert bits(tensor._local_tensor) == bits(shard(whole, mesh, at)._local_tensor)


def over_tensor_parallelism(whole: Tensor, mesh: DeviceMesh) -> DTensor:
    """Return this rank's part of a tensor, placed as by FSDP2 over tensor parallelism: tp splits it first."""
    tp = mesh.size(1)
    return shard(whole, mesh, [_StridedShard(0, split_factor=tp) if tp > 1 else Shard(0), Shard(0)])


@pytest.mark.parametrize(("old", "new"), [((4, 2), (2, 2)), ((2, 2), (4, 2)), ((2, 2), (2, 4)), ((2, 4), (4, 1))])
def test_strided_shards_follow_the_sizes(tmp_path: Path, old: tuple[int, int], new: tuple[int, int]) -> None:
    """Here tp may change too. All tensors are DTensors, or are equal on all ranks."""
    whole = whole_tensor(0, (16, 3), torch.float32)

    def sizes(shape: tuple[int, int]) -> dict[str, int]:
        return {"dp": shape[0], "tp": shape[1]}

    folder = save_all(
        tmp_path,
        wide(*old),
        sizes(old),
        lambda _, mesh: {"model": {"w": over_tensor_parallelism(whole, mesh), "steps": torch.tensor(3.0)}},
    )
    for rank in range(new[0] * new[1]):
        with as_rank(rank, sizes(new)) as mesh:
            found = read(folder, rank, wide(*new), mesh)["model"]
            assert bits(found["w"]._local_tensor) == bits(over_tensor_parallelism(whole, mesh)._local_tensor)
            assert found["steps"].item() == 3.0


def test_tensors_on_meshes_of_different_ranks_are_kept_apart(tmp_path: Path) -> None:
    """Each pipeline stage has tensors with the same names. It shards them over its own data parallel group."""
    stages = [whole_tensor(stage, (12,), torch.float32) for stage in range(2)]

    def tree(rank: int, mesh: DeviceMesh) -> Tree:
        stage = mesh.get_local_rank("pp")
        return {"model": {"w": shard(stages[stage], mesh["dp"], [Shard(0)])}, "stage": stage, "plain": torch.ones(rank)}

    folder = save_all(tmp_path, wide(4, pp=2), {"pp": 2, "dp": 4}, tree)
    keys = [read_manifest(folder, rank).tensors[0].key for rank in (1, 5)]
    assert keys == ["model.w", "group-4.model.w"]
    for rank in range(4):
        with as_rank(rank, {"pp": 2, "dp": 2}) as mesh:
            found = read(folder, rank, wide(2, pp=2), mesh["dp"])
            stage = mesh.get_local_rank("pp")
            expected = shard(stages[stage], mesh["dp"], [Shard(0)])
            assert bits(found["model"]["w"]._local_tensor) == bits(expected._local_tensor)
            assert (found["stage"], len(found["plain"])) == (stage, 4 * stage + rank % 2)
    with as_rank(0, {"pp": 1, "dp": 4}) as mesh, pytest.raises(CheckpointError, match="on a mesh of some ranks only"):
        read(folder, 0, wide(4), mesh["dp"])


def draws(state: dict[str, Any]) -> tuple[float, float, float]:
    """Return the next number of each generator, if the generators have this state."""
    here = RandomState()
    kept = here.state_dict()
    here.load_state_dict(state)
    try:
        return torch.rand(()).item(), float(numpy.random.rand()), random.random()
    finally:
        here.load_state_dict(kept)


def seeded(seed: int) -> dict[str, Any]:
    kept = RandomState().state_dict()
    torch.manual_seed(seed)
    numpy.random.seed(seed)
    random.seed(seed)
    state = RandomState().state_dict()
    RandomState().load_state_dict(kept)
    return state


@pytest.mark.parametrize("alike", [False, True])
def test_ranks_draw_equal_random_numbers_only_if_they_did_before(tmp_path: Path, alike: bool) -> None:
    states = [seeded(1 if alike else rank) for rank in range(2)]
    folder = save_all(tmp_path, wide(2), {"dp": 2}, lambda rank, _: {"everstep.rng": states[rank]})
    found = []
    for rank in range(4):
        with as_rank(rank, {"dp": 4}) as mesh:
            found.append(draws(read(folder, rank, wide(4), mesh)["everstep.rng"]))
            assert draws(read(folder, rank, wide(4), mesh)["everstep.rng"]) == found[rank]
    assert found[:2] == [draws(state) for state in states]
    for numbers in zip(*found, strict=True):
        assert len(set(numbers)) == (1 if alike else 4)


def sharded(tmp_path: Path, ranks: int = 2) -> Path:
    """Write the checkpoint of a job with one tensor of 64 elements, sharded over some ranks. Returns its folder."""
    whole = whole_tensor(0, (64,), torch.float32)
    return save_all(
        tmp_path, wide(ranks), {"dp": ranks}, lambda _, mesh: {"model": {"w": shard(whole, mesh, [Shard(0)])}}
    )


def refused(folder: Path, rank: int = 0, ranks: int = 1) -> str:
    with as_rank(rank, {"dp": ranks}) as mesh, pytest.raises(CheckpointError) as caught:
        read(folder, rank, wide(ranks), mesh)
    return str(caught.value)


@pytest.mark.parametrize("where", ["tensor", "header", "structure"])
def test_a_flipped_bit_is_never_restored(tmp_path: Path, where: str) -> None:
    folder = sharded(tmp_path, 4)
    damaged = 0 if where == "structure" else 1
    manifest = read_manifest(folder, damaged)
    at = {"tensor": manifest.tensors[0].at, "header": 30, "structure": manifest.structure.at + 20}[where]
    path = folder / f"rank-{damaged}.safetensors"
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)
    message = refused(folder, rank=0, ranks=2)
    assert f"{path}" in message and where in message
    with as_rank(1, {"dp": 2}) as mesh:  # this rank needs the file of rank 1 for its tree, and those of ranks 2 and 3
        if where == "header" or damaged == 0:
            read(folder, 1, wide(2), mesh)


def test_an_incomplete_checkpoint_is_refused(tmp_path: Path) -> None:
    folder = sharded(tmp_path, 3)
    (folder / "rank-1.json").rename(folder / "kept.json")
    message = refused(folder)
    assert "is not complete, rank 1 of 3 is missing or damaged" in message and "rank-1.json cannot be read" in message
    (folder / "kept.json").rename(folder / "rank-1.json")
    os.truncate(folder / "rank-2.safetensors", 100)
    assert "rank 2 of 3" in refused(folder)


def test_files_of_another_checkpoint_in_the_folder_are_refused(tmp_path: Path) -> None:
    folder = sharded(tmp_path, 2)
    (folder / "rank-5.safetensors").write_bytes((folder / "rank-1.safetensors").read_bytes())
    assert "has rank-5.safetensors, which does not belong" in refused(folder)
    (folder / "rank-5.safetensors").unlink()
    other = save_all(tmp_path / "other", wide(1, tp=2), {"tp": 2}, lambda *_: {"model": {}})
    for name in ("rank-1.json", "rank-1.safetensors"):
        (other / name).rename(folder / name)
    assert "mixes files of job (1,2,1,1,pp-dp-tp) and job (1,2,2,1,pp-dp-tp)" in refused(folder)


def test_a_hole_between_chunks_is_found(tmp_path: Path) -> None:
    whole = whole_tensor(0, (8,), torch.float32)

    def tree(rank: int, mesh: DeviceMesh) -> Tree:
        return {"model": {"w": shard(whole, mesh, [Shard(0)])} if rank != 1 else {}}

    folder = save_all(tmp_path, wide(4), {"dp": 4}, tree)
    assert "does not have all of the tensor model.w" in refused(folder)


def test_a_path_that_is_no_folder_of_a_step_is_refused(tmp_path: Path) -> None:
    assert "is not a folder of a checkpoint" in refused(tmp_path)
    (tmp_path / "step-000000001").mkdir()
    assert "has no checkpoint" in refused(tmp_path / "step-000000001")


def test_a_state_that_cannot_be_mapped_is_named(tmp_path: Path) -> None:
    def plain(rank: int, _: DeviceMesh) -> Tree:
        return {"model": {"w": torch.full((3,), float(rank))}}

    folder = save_all(tmp_path / "a", wide(2, tp=2), {"dp": 2, "tp": 2}, plain)
    message = refused(folder)
    assert "was saved with pp 1, dp 2, tp 2 and cannot be read with pp 1, dp 1, tp 1" in message
    assert "model.w is not a DTensor, and differs between ranks 0 and 1" in message

    def staged(rank: int, _: DeviceMesh) -> Tree:
        return {"model": {f"stage{rank // 2}": torch.zeros(3)}}

    folder = save_all(tmp_path / "b", wide(2, pp=2), {"pp": 2, "dp": 2}, staged)
    assert "model.stage0 is not in the states of all ranks" in refused(folder)


def test_placements_that_cannot_be_changed_are_named(tmp_path: Path) -> None:
    def summed(_: int, mesh: DeviceMesh) -> Tree:
        return {"model": {"w": DTensor.from_local(torch.ones(3), mesh, [Partial()], run_check=False)}}

    assert "model.w was saved as partial sums" in refused(save_all(tmp_path / "a", wide(2), {"dp": 2}, summed))
    folder = save_all(
        tmp_path / "b", wide(2), {"shards": 2}, lambda _, mesh: {"w": shard(torch.ones(4), mesh, [Shard(0)])}
    )
    assert "w was saved on a mesh with the dimensions shards" in refused(folder)

    def strided(factor: int, *more: Placement) -> Callable[[int, DeviceMesh], Tree]:
        return lambda _, mesh: {"w": shard(torch.ones(13), mesh, [_StridedShard(0, split_factor=factor), *more])}

    folder = save_all(tmp_path / "c", wide(2), {"dp": 2}, strided(2))
    assert "w was saved as partial sums or in several pieces" in refused(folder)
    folder = save_all(tmp_path / "d", wide(2, tp=2), {"dp": 2, "tp": 2}, strided(2, Shard(0)))
    with as_rank(4, {"dp": 3, "tp": 2}) as mesh, pytest.raises(CheckpointError, match="use sizes that divide it"):
        read(folder, 4, wide(3, tp=2), mesh)  # this rank would need the rows 6 and 11
    folder = save_all(tmp_path / "e", wide(2, tp=2), {"dp": 2, "tp": 2}, strided(13, Shard(0)))
    with as_rank(0, {"dp": 3, "tp": 2}) as mesh, pytest.raises(CheckpointError, match="with the same sizes only"):
        read(folder, 0, wide(3, tp=2), mesh)


@pytest.mark.parametrize(
    ("old", "new", "alike"),
    [
        ("4,1,1,1,pp-dp-tp", "8,1,1,1,pp-dp-tp", True),
        ("4,1,dp=4", "8,1,dp_shard=8", True),  # the only data axis has another name
        ("4,1,dp_replicate=2,dp_shard=2", "8,1,dp_replicate=2,dp_shard=4", True),
        ("4,1,dp_shard=4,ep=2:dp_shard", "8,1,dp_shard=8,ep=2:dp_shard", True),
        ("4,1,dp_replicate=2,dp_shard=2,ep=2:dp_replicate", "8,1,dp_replicate=2,dp_shard=4,ep=2:dp_replicate", True),
        ("8,1,dp_replicate=2,dp_shard=4,ep=4:dp_shard", "12,1,dp_replicate=2,dp_shard=6,ep=2:dp_shard", False),
        ("4,1,dp_shard=4", "4,1,dp_shard=4,ep=2:dp_shard", False),
        ("4,1,dp=4", "4,1,dp_replicate=2,dp_shard=2", False),  # either new axis could be the old one
        ("4,1,pp=1,dp=4,tp=1", "4,1,pp=1,dp=2,tp=2", False),
    ],
)
def test_a_rank_reads_the_state_of_an_old_rank_at_the_same_coordinate(
    monkeypatch: pytest.MonkeyPatch, old: str, new: str, alike: bool
) -> None:
    """If states differ, each new rank needs an old rank with the same coordinate. Otherwise there is an error."""
    before, after = OldCheckpoint.__new__(OldCheckpoint), Topology.parse(new)
    before.topology, before.folder = Topology.parse(old), Path("step-000000001")
    monkeypatch.setattr(OldCheckpoint, "_differs", lambda _: "an expert is no DTensor")

    if not alike:
        with pytest.raises(CheckpointError, match="an expert is no DTensor"):
            for rank in range(after.world_size):
                before.source(after, rank)
        return
    for rank in range(after.world_size):
        source = before.source(after, rank)
        for kind in (laid.name for laid in after.laid):
            place = after.group(rank, kind).index(rank)
            assert before.topology.group(source, kind).index(source) == place


def test_each_old_ranks_random_numbers_are_continued_by_one_new_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the states of ranks can be exchanged, the generators of each old rank are used by only one new rank."""
    before, after = OldCheckpoint.__new__(OldCheckpoint), Topology.parse("8,1,dp_replicate=2,dp_shard=4,ep=4:dp_shard")
    before.topology = Topology.parse("4,1,dp_replicate=2,dp_shard=2")
    monkeypatch.setattr(OldCheckpoint, "_differs", lambda _: "")
    generators = [SimpleNamespace(name="everstep.rng.torch", xxh3=rank) for rank in range(4)]
    before.manifests = [SimpleNamespace(tensors=[generator]) for generator in generators]  # type: ignore[misc]

    sources = [before.source(after, rank) for rank in range(8)]
    kept = [source for rank, source in enumerate(sources) if not before.must_reseed(after, rank, source)]
    assert sorted(kept) == [0, 1, 2, 3], "the generators of each old rank are used once"
