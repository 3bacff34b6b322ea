"""Measures the time in which a new rank restores its state, from its own slot and in other ways.

Each sample is a new process, forked from one that has imported torch, as under everstep. It makes model and optimizer.
The measured time is that from the call until the state is in place. The restored state is compared bit for bit.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import mmap
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import xxhash

from benchmarks import forks
from benchmarks.checkpoint_rank import Work
from benchmarks.checkpoint_saves import everstep_environment, scratch
from benchmarks.common import Row, Spread, rows_of, say
from benchmarks.peers.savers import tensors_of

AIM_S = 0.1
"""Aim for 512 MB from own memory, seconds; a plain copy took 0.26 s into new memory, and 0.08 s into warm memory."""
STEP = 7
PRELOADED = ("everstep", "torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.checkpoint.state_dict")
"""Modules that are imported before the fork."""


@dataclass(slots=True)
class Restores:
    """The times of each way, seconds."""

    megabytes: int
    seconds: dict[str, list[float]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def rows(self) -> list[Row]:
        """Return rows that compare everstep's time with the aim and with other ways."""
        name = f"restore of {self.megabytes} MB"
        ours = self.seconds.get("everstep", [])
        aim = AIM_S * self.megabytes / 512
        rows = [Row(f"{name} from own memory, median", "s", Spread.of(ours).median, None, aim, "ours")] if ours else []
        for way in list(WAYS)[1:]:
            rows += rows_of(f"{name}, {way}", "s", ours, self.seconds.get(way, []), aim=None)
        return rows


def measure(megabytes: int, *, runs: int) -> Restores:
    """Save one state in all formats, and restore it in each way in turn."""
    for name in PRELOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # the fork server does this too: collections in a child then do not touch the parent's objects
    try:
        return _measure(Restores(megabytes), runs)
    finally:
        gc.unfreeze()


def _measure(found: Restores, runs: int) -> Restores:
    warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # DCP warns once in each process
    with scratch() as folder:
        forks.call(_save, folder, found.megabytes)
        for run in range(runs + 1):  # the first run warms the page cache and is not counted
            for way in list(WAYS) if run % 2 else list(WAYS)[::-1]:
                try:
                    taken = forks.call(_restore, folder, found.megabytes, way)
                except RuntimeError as error:
                    found.failures.append(f"{way}: {error}")
                    continue
                if run:
                    found.seconds.setdefault(way, []).append(taken)
        say(", ".join(f"{way} {Spread.of(values).median:.3f} s" for way, values in found.seconds.items()))
    return found


def _checkpoint(folder: Path, work: Work) -> Any:
    """Set the variables of a rank under everstep, and return its checkpoint."""
    import everstep

    for name, value in everstep_environment(folder, 1, overlap=True).items():
        os.environ[name] = value.format(rank=0)
    return everstep.join().checkpoint(model=work.model, optimizer=work.optimizer)


def _save(folder: Path, megabytes: int) -> float:
    """Save one state in all formats, and its digest."""
    from torch.distributed import checkpoint as dcp

    work = Work(megabytes, 0)
    work.optimizer.step()
    checkpoint = _checkpoint(folder, work)
    checkpoint.save(STEP)
    checkpoint.close()
    state = {"model": work.model.state_dict(), "optimizer": work.optimizer.state_dict()}
    torch.save(state, folder / "torch.pt")
    dcp.state_dict_saver.save(_flat(work), checkpoint_id=folder / "dcp", no_dist=True)
    with (folder / "plain").open("wb") as file:
        for tensor in tensors_of(state):
            file.write(tensor.detach().numpy().tobytes())
    (folder / "digest").write_text(_digest(work))
    return 0.0


def _restore(folder: Path, megabytes: int, way: str) -> float:
    """Restore in one way and compare the state; returns seconds."""
    work = Work(megabytes, 0)
    for parameter in work.model:
        parameter.data.zero_()
        parameter.grad = None  # a new rank has no gradients
    do = WAYS[way](folder, work)
    began = time.perf_counter()
    do()
    taken = time.perf_counter() - began
    if way != FRESH and _digest(work) != (folder / "digest").read_text():
        raise RuntimeError("the restored state differs from the saved one")
    return taken


def _everstep(folder: Path, work: Work) -> Callable[[], object]:
    checkpoint = _checkpoint(folder, work)
    return lambda: checkpoint.restore(STEP)


def _fresh_copy(folder: Path, work: Work) -> Callable[[], object]:
    """Copy the state into new tensors without verification."""
    sizes = [work.model[0].numel()] * (3 * len(work.model))
    with (folder / "plain").open("r+b") as file:
        mapped = mmap.mmap(file.fileno(), 0)
    base = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
    kept: list[object] = [mapped]

    def copy() -> None:
        for index, size in enumerate(sizes):
            tensor = torch.empty(size)
            kept.append(tensor)
            ctypes.memmove(tensor.data_ptr(), base + 4 * size * index, 4 * size)

    return copy


def _torch_load(folder: Path, work: Work) -> Callable[[], object]:
    def load() -> None:
        state = torch.load(folder / "torch.pt", weights_only=True)
        work.model.load_state_dict(state["model"])
        work.optimizer.load_state_dict(state["optimizer"])

    return load


def _dcp_load(folder: Path, work: Work) -> Callable[[], object]:
    from torch.distributed.checkpoint import state_dict, state_dict_loader

    def load() -> None:
        state = _flat(work)
        state_dict_loader.load(state, checkpoint_id=folder / "dcp", no_dist=True)
        state_dict.set_state_dict(
            work.model,
            work.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )

    return load


FRESH = "copy into fresh memory"
WAYS: dict[str, Callable[[Path, Work], Callable[[], object]]] = {
    "everstep": _everstep,
    FRESH: _fresh_copy,
    "torch.load": _torch_load,
    "DCP load": _dcp_load,
}


def _flat(work: Work) -> dict[str, Any]:
    """Return the state in the form that DCP recommends, with names instead of numbers."""
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model, optimizer = get_state_dict(work.model, work.optimizer)
    return {"model": model, "optimizer": optimizer}


def _digest(work: Work) -> str:
    found = xxhash.xxh3_64()
    for tensor in tensors_of([work.model.state_dict(), work.optimizer.state_dict()["state"]]):
        found.update(tensor.detach().numpy().data)
    return found.hexdigest()
