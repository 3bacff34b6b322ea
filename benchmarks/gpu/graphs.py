"""CUDA graphs are captured while a state is saved; the captures, their replays and the saved states are checked."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.checkpoint_saves import scratch
from benchmarks.gpu.parts import Line
from everstep.slots.file import SlotFile
from everstep.training.checkpoint import Checkpoint
from everstep.training.state.digest import digest_of

ROUNDS = 6
LARGE = 64 << 20
"""Number of parameters of the optimizer that is not captured: 256 MB, and twice that for its moments."""


def measure(*, gpu: bool) -> Iterator[Line]:
    """Yield the captures that succeeded, and whether the states are as they should be."""
    with scratch() as folder:
        things, step = training()
        saved = Checkpoint(things, SlotFile(folder / "checkpoint", slots=4), overlap=True)
        saved.discard()
        captured, replayed_s = 0, []
        graph = torch.cuda.CUDAGraph()
        for number in range(1, ROUNDS + 1):
            torch.cuda.synchronize()
            saved.save(number)  # the copy of the large optimizer runs during the capture
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
            captured += 1
            began = time.perf_counter()
            graph.replay()
            torch.cuda.synchronize()
            replayed_s.append(time.perf_counter() - began)
            things["large"].step()
            things["large"].zero_grad()
        yield Line("graphs captured while a state was saved", float(captured), f"of {ROUNDS}")
        yield Line("replay, the longest", max(replayed_s), "s")
        saved.save(ROUNDS + 1)
        wanted = digest(things)
        saved.wait()
        saved.close()
        things, _ = training()
        again = Checkpoint(things, SlotFile(folder / "checkpoint", slots=4), overlap=True)
        again.restore(ROUNDS + 1)
        yield Line("the restored state is equal", "yes" if digest(things) == wanted else "NO")
        again.close()


def training() -> tuple[dict[str, Any], Any]:
    """Return a small model with a capturable optimizer, a large one, and the step of the small one."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU(), torch.nn.Linear(256, 256)).cuda()
    small = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-3), capturable=True)
    weight = torch.nn.Parameter(torch.randn(LARGE, device="cuda"))
    large = torch.optim.AdamW([weight], lr=1e-3, fused=True)
    weight.grad = torch.ones_like(weight)
    large.step()
    large.zero_grad()
    batch = torch.randn(64, 256, device="cuda")

    def step() -> None:
        small.zero_grad()
        model(batch).square().mean().backward()
        small.step()

    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    return {"model": model, "small": small, "large": large}, step


def digest(things: dict[str, Any]) -> str:
    """Return a digest of the state of all objects."""
    torch.cuda.synchronize()
    return digest_of({name: thing.state_dict() for name, thing in things.items()})
