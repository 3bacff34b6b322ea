"""Which tensors may be copied while training continues, and how changes to them are noticed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from everstep.training.copies import overlap
from everstep.training.copies.overlap import Watched, Witness, classify, probes
from everstep.training.rng import RandomState
from everstep.training.state.codec import Encoded, encode


def overlapped(**things: Any) -> set[str]:
    """Return the names of the tensors whose copies overlap training."""
    encoded, later, _ = classified(**things)
    return {spec.name for spec, one in zip(encoded.layout.specs, later, strict=True) if one}


def classified(**things: Any) -> tuple[Encoded, list[bool], Watched]:
    encoded = encode({name: thing.state_dict() for name, thing in things.items()})
    return encoded, *classify(things.values(), encoded.tensors, encoded.layout.specs)


def trained(model: nn.Module, kind: Any = torch.optim.AdamW, **options: Any) -> torch.optim.Optimizer:
    """Return an optimizer that has a state."""
    optimizer: torch.optim.Optimizer = kind(model.parameters(), **options)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def test_parameters_and_optimizer_state_are_copied_later_what_forward_changes_is_not() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    names = overlapped(model=model, optimizer=trained(model), random=RandomState())
    assert names == {
        *(f"model.{name}" for name, _ in model.named_parameters()),
        *(f"optimizer.state.{index}.{kind}" for index in range(4) for kind in ("step", "exp_avg", "exp_avg_sq")),
    }


def test_parameters_that_no_given_optimizer_trains_are_copied_at_once() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    average = torch.optim.swa_utils.AveragedModel(model)
    half = torch.optim.SGD(model[0].parameters(), momentum=0.9)
    assert overlapped(model=model, average=average, optimizer=half) == {"model.0.weight", "model.0.bias"}
    assert overlapped(model=model, average=average) == set()


def test_a_learning_rate_that_is_a_tensor_is_copied_at_once() -> None:
    model = nn.Linear(2, 2)
    names = overlapped(optimizer=trained(model, lr=torch.tensor(0.1)))
    assert "optimizer.state.0.exp_avg" in names and not any("param_groups" in name for name in names)


def test_a_buffer_in_the_memory_of_a_parameter_keeps_both_from_overlapping() -> None:
    model = nn.Linear(2, 2, bias=False)
    model.register_buffer("same", model.weight.detach())
    assert overlapped(model=model, optimizer=torch.optim.SGD(model.parameters())) == set()


class Detached(torch.optim.Optimizer):
    """Does not call torch's constructor, so its step calls no hooks."""

    def __init__(self, params: Any) -> None:
        self.param_groups = [{"params": list(params)}]
        self.state: Any = {}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        pass


def test_an_optimizer_whose_step_cannot_be_made_to_wait_is_not_trusted() -> None:
    model = nn.Linear(2, 2)
    assert overlapped(model=model, optimizer=Detached(model.parameters())) == set()


def test_an_optimizer_made_for_cuda_graphs_is_not_trusted() -> None:
    model = nn.Linear(2, 2)
    assert overlapped(model=model, optimizer=torch.optim.AdamW(model.parameters(), capturable=True)) == set()


def test_aliases_of_a_parameter_overlap_wherever_they_are() -> None:
    class Wrapper:
        def state_dict(self) -> Any:
            return {"net": [model.weight]}

    model = nn.Linear(2, 2, bias=False)
    assert overlapped(wrapped=Wrapper(), optimizer=torch.optim.SGD(model.parameters())) == {"wrapped.net.0"}


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """A device mesh with only this process."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_shards_overlap_and_are_watched(mesh: DeviceMesh) -> None:
    weight: Any = nn.Parameter(distribute_tensor(torch.randn(64, 4), mesh, [Shard(0)]))
    model = nn.ParameterDict({"weight": weight})
    things = {"model": model, "optimizer": trained(model, foreach=True)}
    encoded, later, watched = classified(**things)
    assert all(later) and len(later) == 4
    assert isinstance(weight.data, DTensor)
    probed = probes(encoded.tensors, encoded.layout.specs, later)
    changes: list[Callable[[], Any]] = [
        lambda: weight.detach().add_(1),
        lambda: weight._local_tensor.data.add_(1),
        lambda: weight._local_tensor.detach().add_(1),
    ]
    for change in changes:
        witness = Witness(watched, probed)
        assert witness.changed() == ""
        change()
        assert witness.changed() == "model.weight"


@pytest.mark.parametrize("contiguous", [True, False])
def test_every_way_to_change_a_parameter_is_noticed(contiguous: bool) -> None:
    model = nn.Linear(64, 64, bias=False)
    if not contiguous:
        model.weight = nn.Parameter(model.weight.detach().T)
    optimizer = trained(model)
    encoded, later, watched = classified(model=model, optimizer=optimizer)
    probed = probes(encoded.tensors, encoded.layout.specs, later)

    def in_place() -> None:
        with torch.no_grad():
            model.weight.mul_(2)

    def by_state() -> None:
        optimizer.state[model.weight]["exp_avg"].zero_()

    def by_data() -> None:
        model.weight.data.mul_(2)

    def fused() -> None:
        torch.optim.AdamW(model.parameters(), fused=True).step()

    for change, name in (
        (in_place, "model.weight"),
        (by_state, "optimizer.state.0.exp_avg"),
        (by_data, "model.weight"),
        (fused, "model.weight"),
    ):
        witness = Witness(watched, probed)
        assert witness.changed() == ""
        change()
        assert witness.changed() == name


def test_reading_and_gradients_are_no_change() -> None:
    model = nn.Linear(64, 64)
    optimizer = trained(model)
    encoded, later, watched = classified(model=model, optimizer=optimizer)
    witness = Witness(watched, probes(encoded.tensors, encoded.layout.specs, later))
    model(torch.randn(2, 64)).sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.zero_grad()
    copy.deepcopy(model)(torch.ones(1, 64))
    assert witness.changed() == ""


def test_memory_between_the_elements_of_a_tensor_is_not_looked_at() -> None:
    whole = torch.zeros(100, 100)
    parts = {"slice": whole[:, :50], "turned": whole.clone().T, "every other": whole.clone().view(-1)[::2]}
    encoded = encode(parts)
    assert [(one.name, one.offset) for one in probes(encoded.tensors, encoded.layout.specs, [True] * 3)] == [
        ("turned", None)
    ]


def test_few_tensors_of_many_are_probed() -> None:
    tensors = {f"{index}": torch.zeros(100) for index in range(1000)}
    encoded = encode(tensors | {"small": torch.zeros(1)})
    found = probes(encoded.tensors, encoded.layout.specs, [True] * 1001)
    assert 32 <= len(found) <= 64
    assert len({probe.name for probe in found}) == len(found)
    for name, at, offset in found:
        assert tensors[name].data_ptr() < at < tensors[name].data_ptr() + 400 - 64
        assert offset == 448 * int(name) + 168


def test_every_state_is_watched_in_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "STATES", 2)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    _, _, watched = classified(model=model, optimizer=trained(model))
    turns = [watched.part(turn) for turn in range(8)]
    assert all(len(part) <= 4 + 2 for part in turns)
    assert {id(one) for part in turns for one in part} == {id(one) for _, one in (*watched.parameters, *watched.states)}
