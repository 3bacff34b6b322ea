"""Time limits of activities. A dead worker is noticed long before an activity is given up."""

from __future__ import annotations

from datetime import timedelta

import pytest

from activities.activity import HEARTBEAT_TIMEOUT, Bounds, twice
from activities.write_to_ledger import ON_LEDGER


@pytest.mark.parametrize("bounds", [twice(timedelta(minutes=1)), ON_LEDGER])
def test_a_dead_worker_is_noticed_by_its_heartbeats(bounds: Bounds) -> None:
    assert bounds.total is not None
    assert HEARTBEAT_TIMEOUT * 5 <= bounds.attempt <= bounds.total
