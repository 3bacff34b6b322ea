"""Hangs for drills, made where real ones are: in collectives, and in the process of a data loader."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

NEVER_S = 1_000_000.0


def skip_collective() -> None:
    """Leave out the next all-reduce that the script calls in this process: its group waits for it."""
    real = dist.all_reduce

    def left_out(*_: Any, **__: Any) -> None:
        dist.all_reduce = real

    dist.all_reduce = left_out  # type: ignore[assignment]


def hang_dataloader() -> None:
    """Wait for a batch of a data loader whose process reads from a place that never answers."""
    next(iter(DataLoader(SilentShards(), num_workers=1)))


def wrong_order() -> None:
    """Meet the others in two groups, odd ranks in another order than even ones: it works on no machine."""
    groups: list[Any] = [None, dist.new_group()]
    for group in groups if dist.get_rank() % 2 else reversed(groups):
        dist.all_reduce(torch.ones(3), group=group)


class SilentShards(Dataset[torch.Tensor]):
    """Data that never comes."""

    def __len__(self) -> int:
        """As long as it has to be."""
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        """Wait."""
        return self.read_shard(index)

    def read_shard(self, index: int) -> torch.Tensor:
        """Read from a place that never answers."""
        time.sleep(NEVER_S)
        return torch.zeros(index)


HANGS: Mapping[str, Callable[[], None]] = {
    "skip-collective": skip_collective,
    "hang-dataloader": hang_dataloader,
    "wrong-order": wrong_order,
}
"""Name of a fault → what it does to this process."""
