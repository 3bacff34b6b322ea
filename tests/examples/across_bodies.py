"""Scripts with state that lives from one body of the loop to the next. ``across_bodies.py NAME`` runs one of them.

Each script is a function. It returns the objects for ``run.checkpoint``, and the body of the loop.
"""

# mypy: disable-error-code="no-untyped-call,no-any-return"

from __future__ import annotations

import os
import random
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler

import everstep
from tests.examples import gradients_across_bodies  # noqa: F401 (it defines further scripts)
from tests.examples.bodies import SCRIPTS, STEPS, Numbers, Script, adamw, batch, last_of_window, network, script


@script
def schedule_per_epoch(_: everstep.Run) -> Script:
    """A scheduler that steps after every fifth body, and another one that needs a mean over these bodies."""
    model = network()
    optimizer = adamw(model)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    mean = Numbers(total=0.0, count=0)

    def body(step: int) -> Tensor:
        optimizer.zero_grad()
        loss = model(batch(step)).square().mean()
        loss.backward()
        optimizer.step()
        mean.values = {"total": mean.values["total"] + loss.item(), "count": mean.values["count"] + 1}
        if step % 5 == 4:
            schedule.step()
            plateau.step(mean.values["total"] / mean.values["count"])
            mean.values = {"total": 0.0, "count": 0}
        return loss.detach()

    things = {"model": model, "optimizer": optimizer, "schedule": schedule, "plateau": plateau, "mean": mean}
    return things, body


@script
def average(_: everstep.Run) -> Script:
    """A running average of the weights, which is evaluated in each body."""
    model = network()
    optimizer = adamw(model)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))

    def body(step: int) -> Tensor:
        optimizer.zero_grad()
        model(batch(step)).square().mean().backward()
        optimizer.step()
        average.update_parameters(model)
        with torch.no_grad():
            evaluated: Tensor = average(batch(0)).square().mean()
        return evaluated

    return {"model": model, "optimizer": optimizer, "average": average}, body


@script
def randomness(_: everstep.Run) -> Script:
    """Dropout, statistics of a BatchNorm, the generators of torch, numpy and Python, and a generator of the script."""
    model = network(nn.BatchNorm1d(16), nn.Dropout(0.3))
    optimizer = adamw(model)
    own = torch.Generator().manual_seed(5)

    class Generator:
        def state_dict(self) -> Tensor:
            return own.get_state()

        def load_state_dict(self, state: Tensor) -> None:
            own.set_state(state)

    def body(step: int) -> Tensor:
        optimizer.zero_grad()
        noise = random.random() + float(numpy.random.rand()) + torch.rand(4, 1, generator=own)
        loss = model(batch(step) + noise).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return {"model": model, "optimizer": optimizer, "generator": Generator()}, body


@script
def lazy(_: everstep.Run) -> Script:
    """Optimizer state that appears late, because some parameters have no gradient in the first steps."""
    model = network()
    side = nn.Linear(8, 4)
    optimizer = torch.optim.SGD([*model.parameters(), *side.parameters()], 0.05, momentum=0.9)

    def body(step: int) -> Tensor:
        optimizer.zero_grad()
        out = model(batch(step)) + (side(batch(step)) if step > 3 else 0.0)
        loss = out.square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return {"model": model, "side": side, "optimizer": optimizer}, body


@script
def lbfgs(_: everstep.Run) -> Script:
    """An optimizer that calls a closure, and whose state is a history of steps."""
    model = network()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, history_size=4)

    def body(step: int) -> Tensor:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(batch(step)).square().mean()
            loss.backward()
            return loss

        return optimizer.step(closure).detach()

    return {"model": model, "optimizer": optimizer}, body


@script
def compiled(_: everstep.Run) -> Script:
    """A model compiled by torch.compile, which is compiled again after a restore."""
    model = network()
    optimizer = adamw(model)
    fast = torch.compile(model, backend="aot_eager")

    def body(step: int) -> Tensor:
        loss: Tensor = fast(batch(step)).square().mean()
        loss.backward()
        if last_of_window(step):
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    return {"model": model, "optimizer": optimizer}, body


class Rows(Dataset[Tensor]):
    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((8,), index / 100.0)


class From(Sampler[int]):
    """Yields row numbers in a fixed random order, from a position on."""

    def __init__(self, first: int) -> None:
        self.first = first

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(1000, generator=torch.Generator().manual_seed(3)).tolist()
        yield from order[self.first :]


@script
def workers(_: everstep.Run) -> Script:
    """Data loader workers read ahead. So the position follows from the step, and not from the sampler's state."""
    model = network(nn.Dropout(0.3))
    optimizer = adamw(model)
    loading: list[Iterator[Tensor]] = []

    def body(step: int) -> Tensor:
        if not loading:  # this is the first body, so the step is known; the loader has its own generator
            seed = torch.Generator().manual_seed(4)
            loading.append(iter(DataLoader(Rows(), 4, sampler=From(4 * step), num_workers=2, generator=seed)))
        optimizer.zero_grad()
        loss = model(next(loading[0])).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return {"model": model, "optimizer": optimizer}, body


@script
def groups_added(_: everstep.Run) -> Script:
    """Parameters that are added to the optimizer while the loop runs."""
    model, side = network(), nn.Linear(8, 4)
    optimizer = adamw(model)

    def body(step: int) -> Tensor:
        if step == 3:
            optimizer.add_param_group({"params": list(side.parameters())})
        optimizer.zero_grad()
        loss = (model(batch(step)) + side(batch(step))).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return {"model": model, "side": side, "optimizer": optimizer}, body


def main() -> None:
    run = everstep.join(tp=1, pp=1)
    if log := os.environ.get("ACROSS_BODIES_LOG"):
        sys.stderr = Path(f"{log}-{run.rank}").open("a", buffering=1)  # noqa: SIM115
        warnings.showwarning = lambda message, *_: print(f"warned: {message}", file=sys.stderr)
    torch.set_num_threads(1)
    if run.world_size > 1:
        dist.init_process_group("gloo")
    things, body = SCRIPTS[sys.argv[1]](run)
    torch.manual_seed(7)
    random.seed(7)
    numpy.random.seed(7)
    try:
        for step in run.steps(STEPS, run.checkpoint(**things)):
            run.report(step, loss=body(step))
    except Exception as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        raise
    if run.world_size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
