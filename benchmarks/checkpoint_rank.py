"""A rank of ``benchmarks/checkpoint.py``: makes busy steps, and saves a state of some size in one of several ways.

    python -P -m benchmarks.checkpoint_rank '{"side": "everstep", …}'

The interpreter of the side's environment runs it. The blocking time is measured in the same way for all sides. It has
two parts. The save is from the end of a step's body to the beginning of the next body. The gate is from the call of
``optimizer.step()`` to the beginning of its work.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.peers import savers
from benchmarks.peers.savers import Saver

FIRST = 3
"""Number of saves at the start that touch new memory: one for each slot of everstep. Other sides have fewer buffers."""
PARAMETERS = 8
"""Usual number of the model's tensors; with two moments each, 24 large tensors are saved."""
SIZE = {"cpu": 1024, "cuda": 8192}
"""Size of the matrices that a step multiplies, which keeps the cores busy but not the memory."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a rank."""

    side: str
    megabytes: int
    """Size of parameters and both moments together, 10^6 bytes."""
    calls: int
    """Number of matrix products in a step; 0: measure how many take a second."""
    warm: int
    """Number of warm-up steps, which are not counted."""
    steps: int
    folder: str
    rank: int
    ranks: int
    device: str = "cpu"
    parameters: int = PARAMETERS


@dataclass(frozen=True, slots=True)
class Sample:
    """The times of one step, seconds."""

    save: float
    gate: float
    waited: float
    """The wait for an earlier save that had not ended; ``save`` does not include it."""
    step: float
    """Time from one body to the next."""


class Timed(torch.optim.AdamW):
    """AdamW that records when its work begins, after all hooks."""

    began = 0.0

    def step(self, closure: Any = None) -> Any:
        """One step."""
        self.began = time.perf_counter()
        return super().step(closure)


class Work:
    """A model with a state of some size, its optimizer, and a step that keeps one core busy.

    Args:
        megabytes: Size of parameters and both moments, 10^6 bytes.
        calls: Number of matrix products in a step.
        device: ``cpu`` or ``cuda``.
        parameters: Number of the model's tensors, which are equally large.
    """

    def __init__(self, megabytes: float, calls: int, device: str = "cpu", parameters: int = PARAMETERS) -> None:
        torch.manual_seed(1)
        each = int(megabytes * 1e6) // (3 * parameters * 4)
        shape = (each // 64, 64)
        self.model = nn.ParameterList(nn.Parameter(torch.randn(shape, device=device)) for _ in range(parameters))
        self._gradients = [torch.full_like(parameter, 1e-3) for parameter in self.model]
        self._differentiate()
        self.optimizer = Timed(self.model.parameters(), lr=1e-6, fused=True)
        self.calls = calls
        self.bytes = 3 * sum(parameter.numel() * 4 for parameter in self.model)
        size = SIZE[device]
        self._left = torch.randn(size, size, device=device)
        self._right = torch.randn(size, size, device=device)
        self._result = torch.empty(size, size, device=device)

    def compute(self) -> None:
        """Do the work that replaces forward and backward; returns when it is done."""
        for _ in range(self.calls):
            torch.mm(self._left, self._right, out=self._result)
        self._differentiate()
        self.finish()

    def update(self) -> None:
        """Make the optimizer's step, and wait until it is done."""
        self.optimizer.step()
        self.finish()

    def _differentiate(self) -> None:
        """Replace the gradients of the last step by new tensors, as a backward pass does."""
        for parameter, gradient in zip(self.model, self._gradients, strict=True):
            parameter.grad = gradient.data

    def finish(self) -> None:
        """Wait for the device, so that its unfinished work does not count for what is measured next."""
        if self._left.is_cuda:
            torch.cuda.synchronize()


class Everstep(Saver):
    """everstep, as a training script uses it."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        import everstep

        self._run = everstep.join()
        self._state = self._run.checkpoint(model=self.model, optimizer=self.optimizer)

    def steps(self, total: int) -> Iterator[int]:
        """Return the loop of a script over its steps."""
        return self._run.steps(total, self._state)

    def report(self, step: int, loss: float) -> None:
        """Report a step, as a script does."""
        self._run.report(step, loss=loss)

    def saved_bytes(self) -> int:
        """Return the size of the newest committed slot's tensors."""
        from everstep.rank import environment
        from everstep.slots.reader import SlotReader

        return SlotReader(Path(os.environ[environment.CHECKPOINT_FILE])).headers()[-1].tensor_bytes


SIDES: dict[str, type[Saver]] = {
    "none": Saver,
    "everstep": Everstep,
    "everstep blocking": Everstep,
    "blocking copy": savers.BlockingCopy,
    "DLRover memory": savers.DlroverMemory,
    "DCP async": savers.Dcp,
    "DCP stager": savers.DcpStager,
}


def main() -> None:
    """Train, and write the samples to ``<folder>/rank-<r>.json``."""
    settings = Settings(**json.loads(sys.argv[1]))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    result: dict[str, Any]
    if not settings.calls:
        result = {"calls_per_second": calibrate(settings.device)}
    else:
        work = Work(settings.megabytes, settings.calls, settings.device, settings.parameters)
        work.update()  # makes the optimizer's moments
        saver = SIDES[settings.side](work.model, work.optimizer, Path(settings.folder), settings.rank)
        first, samples = train(work, saver, settings)
        saved = saver.saved_bytes()
        saver.close()
        if saved is not None and saved < work.bytes:
            raise RuntimeError(f"{settings.side} saved {saved} bytes of {work.bytes}")
        result = {
            "first": [asdict(sample) for sample in first],
            "samples": [asdict(sample) for sample in samples],
            "bytes": work.bytes,
        }
    Path(settings.folder, f"rank-{settings.rank}.json").write_text(json.dumps(result))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # do not wait for threads that a side left; the parent ends the processes that it left


def calibrate(device: str) -> float:
    """Return the number of matrix products per second of one core, or of the device, while all ranks compute."""
    work = Work(1, 20, device)
    work.compute()
    dist.barrier()
    began = time.perf_counter()
    count = 0
    while time.perf_counter() < began + 2:
        work.compute()
        count += work.calls
    return count / (time.perf_counter() - began)


def train(work: Work, saver: Saver, settings: Settings) -> tuple[list[Sample], list[Sample]]:
    """Train; return the samples of the first steps, and those of the steps after the warm-up."""
    first, samples = [], []
    loss = torch.zeros(1)
    ended = 0.0
    for step in saver.steps(settings.warm + settings.steps + 1):
        began = time.perf_counter()
        saved = began - ended - saver.waited_s
        work.compute()
        dist.all_reduce(loss)
        asked = time.perf_counter()
        saver.gate()
        work.update()
        gate = work.optimizer.began - asked
        saver.report(step, 1.0)
        before, ended = ended, time.perf_counter()
        sample = Sample(saved, gate, saver.waited_s, ended - before)
        if 0 < step <= FIRST:
            first.append(sample)
        if step > settings.warm:
            samples.append(sample)
    return first, samples


if __name__ == "__main__":
    main()
