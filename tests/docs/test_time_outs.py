"""The page about hangs lists the time-outs of the installed torch."""

from __future__ import annotations

import re
from pathlib import Path

from torch.distributed.constants import default_pg_nccl_timeout, default_pg_timeout

from everstep.model.recovery_policy import RecoveryPolicy

PAGE = Path(__file__).resolve().parents[2] / "docs" / "concepts" / "hangs.md"


def seconds_of(row: str) -> float:
    """Return the default of the row that begins with a text."""
    [line] = [line for line in PAGE.read_text().splitlines() if line.startswith(f"| {row}")]
    found = re.match(r"([\d.]+) s", line.split("|")[2].strip())
    assert found
    return float(found[1])


def test_the_time_outs_are_those_of_torch_and_of_the_policy() -> None:
    policy = RecoveryPolicy()
    assert seconds_of("everstep, all ranks wait for idle ranks") == policy.hang.idle_floor_s
    assert seconds_of("everstep, nothing is known") == policy.hang.floor_s
    assert seconds_of("a collective of gloo") == default_pg_timeout.total_seconds()
    if default_pg_nccl_timeout is not None:  # torch without CUDA does not have it
        assert seconds_of("a collective of NCCL") == default_pg_nccl_timeout.total_seconds()
