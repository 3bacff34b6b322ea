"""Rates are measured, and nothing of the measurement is left."""

from __future__ import annotations

import errno
import os
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from everstep.system.rates import disk_write_rate, memory_rates

SIZE = 1 << 20


def test_every_rate_is_measured_and_no_file_is_left(tmp_path: Path) -> None:
    for clock in (time.perf_counter, time.process_time):
        rates = memory_rates(tmp_path, size=SIZE, tensor=SIZE // 3, threads=2, rounds=2, clock=clock)
        assert all(rate > 0 for rate in asdict(rates).values())
    assert list(tmp_path.iterdir()) == []


def test_the_fastest_round_counts(tmp_path: Path) -> None:
    ticks = iter(range(10**6))

    def slower_and_slower() -> float:
        return float(next(ticks) ** 2)

    first, all_of_them = (
        memory_rates(tmp_path, size=SIZE, tensor=SIZE, threads=1, rounds=rounds, clock=slower_and_slower)
        for rounds in (1, 3)
    )
    assert first.allocate == SIZE
    assert all_of_them.allocate < first.allocate
    assert all_of_them.allocate > all_of_them.unmap


def test_a_disk_without_room_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert disk_write_rate(tmp_path, SIZE) > 0
    assert list(tmp_path.iterdir()) == []

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        disk_write_rate(tmp_path, SIZE)
