"""The comparison of a plan with what was measured."""

from __future__ import annotations

import pytest

from benchmarks.plan import POLICY, Compared, Real, Times, compare
from controlplane.measure import Measured
from everstep.slots.footprint import footprint

TEN = ("copy_gb_s", "piece_copy_gb_s", "hash_gb_s", "cached_hash_gb_s", "map_gb_s", "clear_gb_s")
RATES: Measured = dict.fromkeys(TEN, 10.0) | {"memory_gb": 20, "shm_gb": 20, "cores": 2, "memory_gb_s": 100}


def test_a_difference_is_a_share_of_what_was_measured() -> None:
    assert Compared("save", "s", 1.1, 1.0).difference == pytest.approx(0.1)
    assert [Compared("save", "s", planned, 1.0).met for planned in (0.79, 0.81, 1.19, 1.21)] == [
        *(False, True, True, False)
    ]


def test_the_fastest_run_is_compared_with_the_plan() -> None:
    need = footprint(10**9, 1, POLICY.slots, POLICY.backup_slots)
    real = Real(10**9, need.own, need.backups, need.own, 10**9, dict(RATES), dict(RATES))
    real.save = [Times(0.5, 0.4), Times(0.15, 0.3)]  # two threads hash
    real.restore = [Times(0.4, 0.4), Times(0.7, 0.3)]
    rows = {row.name.partition(": ")[2]: row for row in compare(1000, real) if "CPU" not in row.name}

    assert all(rows[name].difference == 0 for name in ("memory of own slots", "memory of backups", "file on disk"))
    assert rows["save, copy and checksum"].measured == 0.15
    assert rows["save, copy and checksum"].planned == pytest.approx(0.15, rel=0.05)
    assert rows["restore from own memory"].measured == 0.4
    assert 0.1 < rows["restore from own memory"].planned < 0.5
