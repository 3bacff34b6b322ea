"""The law of restores on a GPU: a run that everstep restores continues bit for bit as the undisturbed one.

Without a GPU, tensors of the host's memory are copied as if they were on a GPU, with the fake of the tests.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator

import torch

from benchmarks.gpu.parts import Line
from tests.everstep.training.recording_cuda import stand_in_for_gpu
from tests.everstep.training.restored_runs import Way, verdict, ways

LONGEST_S = 45.0
"""No other run begins after this time, seconds."""
SMALL = 4
"""Number of runs without a GPU."""


def measure(*, gpu: bool) -> Iterator[Line]:
    """Yield the number of runs with each verdict."""
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    chosen = list(ways("cuda" if gpu else "cpu"))
    random.Random(1).shuffle(chosen)
    chosen.sort(key=lambda way: not any(kind in way.optimizer for kind in ("fused", "capturable")))
    ended = time.monotonic() + LONGEST_S
    found: Counter[str] = Counter()
    examples: dict[str, str] = {}
    for way in chosen if gpu else chosen[:SMALL]:
        if time.monotonic() > ended:
            break
        judged, error = judge(way, gpu)
        found[judged] += 1
        examples.setdefault(judged, f"{way.optimizer}, {way.layout}, {way.extra}{error}")
    yield Line("runs that could be made", float(len(chosen)), why="those with fused and capturable optimizers first")
    for judged, count in sorted(found.items()):
        example = "" if judged == "undisturbed" else f"e.g. {examples[judged]}"
        yield Line(f"restored runs: {judged}", float(count), why=example)


def judge(way: Way, gpu: bool) -> tuple[str, str]:
    """Return the verdict of a run, and the error if there was one."""
    try:
        if gpu:
            return verdict(way), ""
        with stand_in_for_gpu() as cuda:
            return verdict(way, cuda), ""
    except Exception as error:
        return "did not run", f": {error}".splitlines()[0][:200]
