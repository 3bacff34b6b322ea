"""What is tried how long: a part that died is noticed long before what it did is given up."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from workflows.options import HEARTBEAT_TIMEOUT, on_ledger, on_ranks


@pytest.mark.parametrize("options", [lambda: on_ranks(timedelta(minutes=1)), on_ledger])
def test_a_dead_worker_is_noticed_by_its_heartbeats(options: Callable[[], dict[str, Any]]) -> None:
    given = options()
    assert given["heartbeat_timeout"] == HEARTBEAT_TIMEOUT
    assert given["heartbeat_timeout"] * 5 <= given["start_to_close_timeout"] <= given["schedule_to_close_timeout"]
