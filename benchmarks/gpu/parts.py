"""The parts of the benchmark on a GPU: what each one measures, what it needs, and how long it may take."""

from __future__ import annotations

import importlib
import json
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

LIBRARY = ("torch", "numpy", "xxhash")
"""Packages that the training library needs."""


@dataclass(frozen=True, slots=True)
class Line:
    """One result."""

    name: str
    value: float | str | None
    """None: it was not measured."""
    unit: str = ""
    peer: float | None = None
    """The value of the peer, or of the other way that the name mentions; None: there is none."""
    why: str = ""
    """Why it was not measured, or what the value means."""


@dataclass(frozen=True, slots=True)
class Part:
    """One part. It runs in a process of its own."""

    name: str
    limit_s: int
    """Longest time, seconds."""
    module: str
    """The module in this folder whose ``measure`` yields the lines."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of ``measure``, beside ``gpu``."""
    needs_gpu: bool = True
    packages: tuple[str, ...] = LIBRARY


PARTS = (
    Part("law of restores", 55, "laws", needs_gpu=False),
    Part("CUDA graphs", 30, "graphs"),
    Part("pinning and copies", 45, "pinning", needs_gpu=False),
    Part("saves of 2 GB", 40, "saves", {"gigabytes": 2.0, "steps": 10}, needs_gpu=False),
    Part("saves of 8 GB", 70, "saves", {"gigabytes": 8.0, "steps": 8}),
    Part("saves of 20 GB", 110, "saves", {"gigabytes": 20.0, "steps": 5}),
    Part("four ranks on one GPU", 45, "saves", {"gigabytes": 0.5, "steps": 10, "ranks": 4}),
    Part("restore, memory and exit", 50, "restores", needs_gpu=False),
    Part("kill-rank", 60, "kill_rank", packages=(*LIBRARY, "grpc", "pydantic", "sqlalchemy", "temporalio", "typer")),
    Part("Xid", 25, "xid", packages=("torch",)),
)
"""The parts in their order. The one that breaks its own CUDA context comes last."""


def named(name: str) -> Part:
    """Return the part with a name.

    Raises:
        ValueError: there is none.
    """
    for part in PARTS:
        if part.name == name:
            return part
    raise ValueError(f"there is no part {name!r}; the parts are {', '.join(part.name for part in PARTS)}")


def main() -> None:
    """Run one part in this process, and print each result as a line of JSON: ``NAME gpu|small``."""
    # The part ends by an exception, so that it ends the processes that it started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("the time limit was reached"))
    part, gpu = named(sys.argv[1]), sys.argv[2] == "gpu"
    measure: Callable[..., Iterator[Line]] = importlib.import_module(f"benchmarks.gpu.{part.module}").measure
    for line in measure(gpu=gpu, **part.options):
        print(json.dumps(asdict(line)), flush=True)


if __name__ == "__main__":
    main()
