"""The values that a report accepts, and numbers that are copied from a GPU."""

from __future__ import annotations

import fractions
import math
import multiprocessing
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn

import everstep
from everstep.errors import ConfigError
from everstep.rank.step_reports import ReportFile
from everstep.training import deferred_reports

StartRank = Callable[..., ReportFile]


@pytest.mark.parametrize(
    "value",
    [
        2.5,
        numpy.float64(2.5),
        numpy.float32(2.5),
        numpy.array([[2.5]]),
        fractions.Fraction(5, 2),
        torch.tensor(2.5),
        torch.tensor([[2.5]], dtype=torch.bfloat16),
        torch.tensor(2.5, requires_grad=True),
        nn.Parameter(torch.tensor([2.5])),
    ],
)
def test_numbers_and_whatever_holds_one(start_rank: StartRank, value: Any) -> None:
    agent = start_rank()
    everstep.join().report(0, loss=value, grad_norm=value)
    newest = agent.snapshot().newest
    assert newest is not None
    assert (newest.loss, newest.grad_norm) == (2.5, 2.5)


def test_whole_numbers_are_numbers(start_rank: StartRank) -> None:
    agent = start_rank()
    everstep.join().report(0, loss=3, grad_norm=torch.tensor(True))
    newest = agent.snapshot().newest
    assert newest is not None and (newest.loss, newest.grad_norm) == (3.0, 1.0)


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize(
    ("value", "what"),
    [
        (torch.ones(2), r"a Tensor of shape \(2,\)"),
        (torch.ones(0), r"a Tensor of shape \(0,\)"),
        (numpy.ones((2, 2)), r"a ndarray of shape \(2, 2\)"),
        ("2.5", "a str"),
        ([2.5], "a list"),
    ],
)
def test_anything_else_is_named(
    request: pytest.FixtureRequest, start_rank: StartRank, value: Any, what: str, inside: bool
) -> None:
    start_rank() if inside else request.getfixturevalue("outside")
    for name in ("loss", "grad_norm"):
        with pytest.raises(ConfigError, match=rf"report\({name}=…\) got {what}: give a number, or a tensor or array"):
            everstep.join().report(0, **{"loss": 1.0, name: value})


def a_rank(rank: int, folder: Path, results: Any) -> None:
    """Run a rank with a sharded model. Only this rank reports, so a collective in a report would wait for ever."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=mesh)
    model(torch.ones(1, 4) + rank).sum().backward()
    norm = DTensor.from_local(torch.tensor(1.0 + rank), mesh, [Partial()])
    whole = norm.full_tensor()
    clipped: Any = nn.utils.clip_grad_norm_(
        model.parameters(), 1.0
    )  # some versions of torch return the complete norm, others a part
    replicated = distribute_tensor(torch.tensor(2.5), mesh, [Replicate()])
    found: dict[str, Any] = {"whole": whole.item(), "clipped": clipped.full_tensor().item()}
    if rank == 0:  # the other rank does not report
        file = ReportFile.create(folder / "report", rank=0, generation=1)
        run = everstep.join()
        run._reports = ReportFile.open(folder / "report")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(2):
                run.report(step, loss=replicated, grad_norm=norm)
            run.report(2, loss=1.0, grad_norm=whole)
            run.report(3, loss=1.0, grad_norm=clipped)
        try:
            run.report(3, loss=norm)
        except ConfigError as error:
            found["error"] = str(error)
        found["warned"] = [str(one.message) for one in caught]
        found["reported"] = [(one.loss, one.grad_norm) for one in file.records(0)[1]]
    results.put((rank, found))
    dist.barrier()
    dist.destroy_process_group()


def two_ranks(folder: Path, results: Any) -> None:
    """Fork two ranks after the slow imports, so that both ranks share the imports."""
    import torch.distributed.fsdp
    import torch.distributed.tensor  # noqa: F401

    other = multiprocessing.get_context("fork").Process(target=a_rank, args=(1, folder, results))
    other.start()
    a_rank(0, folder, results)
    other.join(60)
    assert other.exitcode == 0


@pytest.mark.usefixtures("outside")
def test_dtensors_of_two_ranks(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    ranks = context.Process(target=two_ranks, args=(tmp_path, results))
    ranks.start()
    found = dict(results.get(timeout=100) for _ in range(2))
    ranks.join(60)
    assert ranks.exitcode == 0
    ours = found[0]
    (loss, norm), (again, _), (_, whole), (_, clipped) = ours["reported"][:4]
    assert loss == again == 2.5 and math.isnan(norm)
    assert whole == ours["whole"] == found[1]["whole"] == 3.0
    assert clipped == ours["clipped"] or math.isnan(clipped)
    assert len(ours["warned"]) == 1
    assert "give grad_norm.full_tensor(), which all ranks have to call" in ours["warned"][0]
    assert "report(loss=…) got a DTensor that is spread over ranks" in ours["error"]


def test_one_rank_s_mesh_makes_everything_whole() -> None:
    class Mesh:
        def size(self, axis: int) -> int:
            return 1

    class Placement:
        def is_replicate(self) -> bool:
            return False

    class Lone:
        placements = (Placement(),)
        device_mesh = Mesh()
        _local_tensor = torch.tensor(2.5)

    assert deferred_reports.plain("grad_norm", Lone()) is Lone._local_tensor
