"""States are saved to slots and restored from them, bit for bit."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import everstep
from everstep.errors import CheckpointError, CorruptCheckpoint
from everstep.rank.step_reports import ReportFile
from everstep.slots.file import SlotFile
from everstep.slots.reader import held
from everstep.slots.tensor_table import pack_table, split
from everstep.training.checkpoint import Checkpoint
from everstep.training.state.codec import encode
from tests.everstep.slots.saved import payload_at

StartRank = Callable[..., ReportFile]


class Holder:
    """An object whose state is any tree."""

    def __init__(self, tree: Any) -> None:
        self.tree = tree

    def state_dict(self) -> Any:
        return self.tree

    def load_state_dict(self, tree: Any) -> None:
        self.tree = tree


class Sampler:
    """A sampler of shuffled indices, whose state is its position."""

    def __init__(self, size: int) -> None:
        self.size, self.position = size, 0

    def next(self, count: int) -> torch.Tensor:
        order = torch.randperm(self.size, generator=torch.Generator().manual_seed(self.position // self.size))
        taken = order[self.position % self.size :][:count]
        self.position += count
        return taken

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def seed_everything(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)


def train(total: int, *, seed: int, stop_after: int = -1) -> tuple[dict[int, str], list[bytes]]:
    """Train in a loop with every kind of randomness. Returns the loss of each step, and the final weights."""
    run = everstep.join()
    seed_everything(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=100)
    sampler = Sampler(64)
    data = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    state = run.checkpoint(model=model, optimizer=optimizer, schedule=schedule, data=sampler)
    losses = {}
    for step in run.steps(total, state):
        rows = data[sampler.next(8)] + random.random() + float(numpy.random.rand())
        loss = model(rows).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses[step] = loss.item().hex()
        if step == stop_after:
            break
    return losses, [tensor.numpy().tobytes() for tensor in model.state_dict().values()]


def test_a_resumed_training_is_equal_bit_for_bit(start_rank: StartRank, shm: Path) -> None:
    start_rank(1)
    undisturbed = train(20, seed=7)
    (shm / "checkpoint-0").unlink()
    start_rank(2)
    first, _ = train(20, seed=7, stop_after=12)  # the body of step 12 ran, but its state was not saved
    assert max(slot.completed_steps for slot in held(shm / "checkpoint-0")) == 12
    start_rank(3, resume=12)
    rest, weights = train(20, seed=99)  # the restore overwrites everything that depends on the seed
    assert {**first, **rest} == undisturbed[0]
    assert weights == undisturbed[1]
    assert min(rest) == 12


def test_the_optimizer_never_writes_into_the_slot_that_it_was_loaded_from(start_rank: StartRank, shm: Path) -> None:
    start_rank(1)
    train(6, seed=7)
    start_rank(2, resume=5)
    run = everstep.join()
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=100)
    steps = run.steps(6, run.checkpoint(model=model, optimizer=optimizer, schedule=schedule, data=Sampler(64)))
    assert next(steps) == 5
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
    assert [slot.completed_steps for slot in held(shm / "checkpoint-0") if slot.valid] == [5]


def tree() -> dict[Any, Any]:
    return {
        "numbers": [1, -(2**70), 2.5, float("inf"), True, None, 3j],
        "text": "ein Wort",
        5: (b"bytes", ("nested", [])),
        "tensors": {
            str(dtype): torch.arange(6).reshape(2, 3).to(dtype)
            for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool)
        },
        "transposed": torch.arange(6.0).reshape(2, 3).T,
        "sliced": torch.arange(10.0)[::3],
        "scalar": torch.tensor(1.5),
        "empty": torch.empty(0, 4),
        "complex": torch.tensor([1 + 2j, 3 - 4j]).conj(),
        "array": numpy.arange(6, dtype=numpy.uint32).reshape(3, 2),
        "scalar array": numpy.array(2.5),
        "numpy number": numpy.float32(0.1),
        "ordered": collections.OrderedDict(b=1, a=2),
        "counter": collections.Counter("aab"),
        "set": {1, 2},
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "size": torch.Size((2, 3)),
        "parameter": nn.Parameter(torch.ones(3)),
    }


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and bool((left == right).all())
    if isinstance(left, numpy.ndarray):
        return left.dtype == right.dtype and left.shape == right.shape and bool((left == right).all())
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(same(a, b) for a, b in zip(left, right, strict=True))
    return bool(left == right)


def test_every_kind_of_value_is_restored(shm: Path) -> None:
    checkpoint = Checkpoint({"a": Holder(tree()), "b": Holder([1])}, SlotFile(shm / "c"))
    checkpoint.save(3)
    fresh = Holder(None)
    Checkpoint({"a": fresh, "b": Holder(None)}, SlotFile(shm / "c")).restore(3)
    expected = tree()
    assert same(fresh.tree, expected)
    kinds = {key: type(value) for key, value in expected.items()}
    assert {key: type(value) for key, value in fresh.tree.items()} == kinds


def test_a_state_that_grows_or_changes_can_be_saved(shm: Path) -> None:
    holder = Holder({})
    checkpoint = Checkpoint({"a": holder}, SlotFile(shm / "c"))
    for step, value in enumerate([torch.ones(2), torch.ones(300_000), [torch.ones(3), "x" * 200_000], torch.ones(2)]):
        holder.tree = value
        checkpoint.save(step)
        fresh = Holder(None)
        Checkpoint({"a": fresh}, SlotFile(shm / "c")).restore(step)
        assert same(fresh.tree, value)


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """A device mesh with only this process."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    dist.destroy_process_group()


def sharded(mesh: DeviceMesh, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model and its optimizer.

    The weight is a DTensor. It is sharded twice along one dimension, as by FSDP2 over tensor parallelism.
    """
    torch.manual_seed(seed)
    weight = nn.Parameter(distribute_tensor(torch.randn(6, 4), mesh, [Shard(0), Shard(0)]))
    bias = nn.Parameter(distribute_tensor(torch.randn(6), mesh, [Replicate(), Replicate()]))
    model = nn.ParameterDict({"weight": weight, "bias": bias})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        (weight.sum() + bias.square().sum()).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return model, optimizer


def test_dtensors_save_and_load_their_local_shard(shm: Path, mesh: DeviceMesh) -> None:
    model, optimizer = sharded(mesh, 1)
    Checkpoint({"model": model, "optimizer": optimizer}, SlotFile(shm / "c")).save(2)
    fresh_model, fresh_optimizer = sharded(mesh, 2)
    Checkpoint({"model": fresh_model, "optimizer": fresh_optimizer}, SlotFile(shm / "c")).restore(2)
    for saved, loaded in zip(model.parameters(), fresh_model.parameters(), strict=True):
        assert isinstance(loaded, DTensor) and isinstance(saved, DTensor)
        assert loaded.placements == saved.placements
        assert torch.equal(loaded.to_local(), saved.to_local())
        moment = fresh_optimizer.state[loaded]["exp_avg_sq"]
        assert isinstance(moment, DTensor) and moment.placements == saved.placements
        assert torch.equal(moment.to_local(), optimizer.state[saved]["exp_avg_sq"].to_local())
    fresh_optimizer.zero_grad()
    for parameter in fresh_model.parameters():
        parameter.sum().backward()  # type: ignore[no-untyped-call]
    fresh_optimizer.step()
    assert held(shm / "c")[0].valid
    with pytest.raises(CheckpointError, match=r"on the mesh \('dp', 'tp'\) of ranks \[0\], which no model"):
        Checkpoint({"model": Holder(0), "optimizer": Holder(0)}, SlotFile(shm / "c")).restore(2)


class Keeping(nn.Linear):
    """A module with extra state, which is a tensor that is not a parameter."""

    extra = torch.arange(3.0)

    def get_extra_state(self) -> Any:
        return {"extra": self.extra}

    def set_extra_state(self, state: Any) -> None:
        self.extra = state["extra"]


def test_restored_tensors_do_not_share_memory_with_the_slot(shm: Path) -> None:
    model, holder = Keeping(3, 2), Holder({"a": torch.ones(5), "b": [torch.arange(4)], "c": torch.ones(3, 2).T})
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    things: dict[str, Any] = {"model": model, "optimizer": optimizer, "model.weight": holder}
    Checkpoint(things, SlotFile(shm / "c")).save(1)
    before = (shm / "c").read_bytes()
    file = SlotFile(shm / "c")
    Checkpoint(things, file).restore(1)
    momenta = [state["momentum_buffer"] for state in optimizer.state.values()]
    for tensor in (*model.parameters(), model.extra, *momenta, *holder.tree.values(), holder.tree["b"][0]):
        if isinstance(tensor, torch.Tensor):
            tensor.data.fill_(99)
    assert (shm / "c").read_bytes() == before
    Checkpoint(things, SlotFile(shm / "c")).restore(1)
    assert model.extra.tolist() == [0, 1, 2] and holder.tree["b"][0].tolist() == [0, 1, 2, 3]


class Observer(nn.Linear):
    """A module that uses a loaded tensor itself as its buffer, as torch's HistogramObserver does."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.register_buffer("least", torch.zeros(4))

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *more: Any) -> None:
        self.least = state_dict[f"{prefix}least"]
        super()._load_from_state_dict(state_dict, prefix, *more)


def test_a_module_that_keeps_a_loaded_tensor_gets_a_copy(shm: Path) -> None:
    model = nn.Sequential(Observer(), nn.ReLU())
    Checkpoint({"model": model}, SlotFile(shm / "c")).save(1)
    before = (shm / "c").read_bytes()
    Checkpoint({"model": model}, SlotFile(shm / "c")).restore(1)
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.fill_(99)
    assert (shm / "c").read_bytes() == before


def exchange(_: Any, state_dict: Any, prefix: str, *more: Any) -> None:
    """A hook that exchanges the names of two tensors in a state dict."""
    one, other = f"{prefix}0.weight", f"{prefix}1.weight"
    state_dict[one], state_dict[other] = state_dict[other], state_dict[one]


def test_a_model_that_exchanges_names_on_save_and_load_is_restored(shm: Path) -> None:
    model: Any = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model._register_state_dict_hook(exchange)
    model.register_load_state_dict_pre_hook(exchange)
    weights = [model[0].weight.tolist(), model[1].weight.tolist()]
    Checkpoint({"model": model}, SlotFile(shm / "c")).save(1)
    nn.init.zeros_(model[0].weight)
    Checkpoint({"model": model}, SlotFile(shm / "c")).restore(1)
    assert [model[0].weight.tolist(), model[1].weight.tolist()] == weights


@pytest.mark.parametrize("change", [{"nbytes": 1 << 50}, {"nbytes": 40}, {"offset": 1 << 40}, {"offset": -64}])
def test_a_damaged_table_reads_nothing_outside_the_slot(shm: Path, change: dict[str, Any]) -> None:
    model = nn.Linear(3, 3, bias=False)
    good = encode({"model": model.state_dict(), "everstep.step": 1})
    bad = pack_table([good.layout.specs[0]._replace(**change), *good.layout.specs[1:]])
    file = SlotFile(shm / "c")
    file.begin(bad + good.structure[len(good.layout.table) :], good.layout.total_bytes)
    file.commit(1)
    with pytest.raises(CorruptCheckpoint):
        Checkpoint({"model": model}, SlotFile(shm / "c")).restore(1)


@pytest.mark.parametrize("order", [("model", "optimizer"), ("optimizer", "model")])
@pytest.mark.parametrize("part", range(8))
def test_any_damage_is_found_before_the_state_is_used(shm: Path, part: int, order: tuple[str, str]) -> None:
    model = nn.Linear(50, 50)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 50)).sum().backward()
    optimizer.step()
    made: dict[str, Any] = {"model": model, "optimizer": optimizer}
    things = {name: made[name] for name in order}
    Checkpoint(things, SlotFile(shm / "c")).save(1)
    size = next(one.bytes for one in held(shm / "c") if one.valid)
    raw = bytearray((shm / "c").read_bytes())
    raw[payload_at(shm / "c", 1) + (size - 1) * part // 7] ^= 4
    (shm / "c").write_bytes(raw)
    with pytest.raises(CorruptCheckpoint, match="the state after step 1 is damaged: its contents do not match"):
        Checkpoint(things, SlotFile(shm / "c")).restore(1)


class Custom:
    """A type that is not allowed in a state dict."""


@pytest.mark.parametrize(
    "value",
    [
        *(Custom(), print, Custom, lambda: 0, torch.empty(1, device="meta")),
        *(numpy.array([None]), numpy.ma.masked_array([1.0, 2.0], [True, False])),
        torch.zeros(2, dtype=torch.uint8).view(torch.quint8),
    ],
)
def test_a_value_that_cannot_be_saved_is_refused(shm: Path, value: Any) -> None:
    checkpoint = Checkpoint({"a": Holder(1)}, SlotFile(shm / "c"))
    checkpoint.save(1)
    with pytest.raises(CheckpointError, match="a state dict has"):
        Checkpoint({"a": Holder({"deep": [value]})}, SlotFile(shm / "c")).save(2)
    assert [slot.completed_steps for slot in held(shm / "c") if slot.valid] == [1]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_is_refused(shm: Path) -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    with (
        contextlib.closing(Checkpoint({"a": Holder({"deep": nested})}, SlotFile(shm / "c"))) as checkpoint,
        pytest.raises(CheckpointError, match="a state dict has a nested Tensor"),
    ):
        checkpoint.save(1)


class Sharded:
    """As Megatron-LM's optimizer: its ``state_dict`` has the groups of the inner optimizer, and no state."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.optimizer = inner
        self.param_groups = inner.param_groups

    def state_dict(self) -> dict[str, Any]:
        return {"param_groups": self.optimizer.state_dict()["param_groups"]}

    def load_state_dict(self, state: Any) -> None:
        """Load nothing."""


def test_an_optimizer_whose_state_dict_leaves_state_out_is_refused(shm: Path) -> None:
    model = nn.Linear(8, 8)
    inner = torch.optim.Adam(model.parameters())
    model(torch.ones(8)).sum().backward()
    inner.step()
    incomplete = Checkpoint({"model": model, "optimizer": Sharded(inner)}, SlotFile(shm / "c"))
    with (
        contextlib.closing(incomplete),
        pytest.raises(CheckpointError, match="'optimizer' is a Sharded with 584 bytes of optimizer state, but"),
    ):
        incomplete.save(1)
    schedule = torch.optim.lr_scheduler.ConstantLR(
        inner
    )  # it keeps the optimizer in an attribute, and saves none of it
    with contextlib.closing(
        Checkpoint({"model": model, "optimizer": inner, "schedule": schedule}, SlotFile(shm / "d"))
    ) as complete:
        complete.save(1)


def test_a_module_with_an_expanded_buffer_is_refused_at_the_first_save(shm: Path) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("mask", torch.ones(1, 2).expand(3, 2))
    with (
        contextlib.closing(Checkpoint({"model": model}, SlotFile(shm / "c"))) as checkpoint,
        pytest.raises(CheckpointError, match=r"model\.mask is an expanded tensor"),
    ):
        checkpoint.save(1)


class Averages(nn.Module):
    """A module whose buffers are not in its state dict."""

    table: Any
    mean: Any

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", None, persistent=False)
        self.register_buffer("mean", torch.zeros(2), persistent=False)

    def forward(self, changes: bool) -> None:
        if self.table is None:
            self.table = torch.arange(2.0)
        if changes:
            self.mean.add_(1)


def test_a_buffer_that_is_not_saved_and_changes_is_reported_once(shm: Path) -> None:
    checkpoint = Checkpoint({"model": (model := Averages())}, SlotFile(shm / "c"))
    for step in (1, 2, 3):
        model(changes=False)  # the table is filled once, as tables of positions are
        checkpoint.save(step)
    model(changes=True)
    with pytest.warns(RuntimeWarning, match=r"everstep: model\.mean changed in a step"):
        checkpoint.save(4)
    model(changes=True)
    checkpoint.save(5)
    checkpoint.close()


def test_the_table_has_the_chunk_of_a_dtensor(mesh: DeviceMesh) -> None:
    weight = distribute_tensor(torch.randn(6, 4), mesh, [Shard(0), Replicate()])
    spec = split(encode({"model": {"weight": weight}}).structure)[0][0]
    assert (spec.name, spec.shape, spec.global_shape, spec.offsets) == ("model.weight", (6, 4), (6, 4), (0, 0))
    assert (spec.replica, spec.group) == (False, None)


def test_a_state_of_another_step_than_its_label_is_refused(shm: Path) -> None:
    file = SlotFile(shm / "c")
    Checkpoint({"a": Holder(1)}, file).save(4)
    payload = file.load(4)
    mislabelled = SlotFile(shm / "d")
    base = mislabelled.begin(payload.structure, len(payload.tensors))
    ctypes.memmove(base, payload.tensors.tobytes(), len(payload.tensors))
    mislabelled.commit(5)
    with pytest.raises(CorruptCheckpoint, match="labelled with step 5 is that after step 4"):
        Checkpoint({"a": Holder(0)}, mislabelled).restore(5)


def test_damage_and_different_names_or_shapes_are_explained(shm: Path) -> None:
    path = shm / "c"
    Checkpoint({"model": nn.Linear(2, 3)}, SlotFile(path)).save(4)
    with pytest.raises(CheckpointError, match="the checkpoint has model, but the script names net"):
        Checkpoint({"net": nn.Linear(2, 3)}, SlotFile(path)).restore(4)
    with pytest.raises(
        CheckpointError, match=r"the saved state of 'model' does not fit the script's Linear: [^$]*size mismatch"
    ):
        Checkpoint({"model": nn.Linear(5, 3)}, SlotFile(path)).restore(4)
    raw = bytearray(path.read_bytes())
    raw[payload_at(path, 4)] ^= 1
    path.write_bytes(raw)
    with pytest.raises(CorruptCheckpoint, match="the state after step 4 is damaged: its contents do not match"):
        Checkpoint({"model": nn.Linear(2, 3)}, SlotFile(path)).restore(4)
