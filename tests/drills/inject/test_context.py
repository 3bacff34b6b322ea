"""A drill waits until the processes of its cluster are back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from drills.inject import context
from drills.inject.context import DrillContext


def of(*looks: dict[str, int]) -> Any:
    """Return a context whose cluster shows these processes, one entry for each look. The last entry stays."""
    rest = list(looks)
    return SimpleNamespace(cluster=SimpleNamespace(processes=lambda: rest.pop(0) if len(rest) > 1 else rest[0]))


async def test_processes_are_back_when_all_have_new_process_ids() -> None:
    looks = [{"ledger": 7}, {}, {"ledger": 8, "worker-0": 3}, {"ledger": 8, "worker-0": 4}]
    found = of(*looks)
    assert await DrillContext.processes_back(found, {"ledger": 7, "worker-0": 3}) is not None
    assert found.cluster.processes() == looks[-1]


async def test_processes_that_stay_away_are_not_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "BACK_LIMIT_S", 0.1)
    assert await DrillContext.processes_back(of({"ledger": 7}), {"ledger": 7}) is None
