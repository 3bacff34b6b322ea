"""The arithmetic of measured blocks of steps. Blocks with and without everstep take turns."""

from __future__ import annotations

import pytest

from benchmarks.blocks import fastest, interval, mean, median


def test_the_interval_contains_the_loss_and_widens_with_noise() -> None:
    without = [[1.0] * 4] * 12
    assert interval([[1.01] * 4] * 12, without, fastest) == pytest.approx((1 - 1 / 1.01,) * 2)
    low, high = interval([[0.96] * 4, [1.06] * 4] * 6, without, mean)
    assert low < 1 - 1 / 1.01 < high


def test_one_slow_step_changes_only_the_mean() -> None:
    blocks = [[1.0] * 10, [1.0] * 9 + [11.0]]
    assert (fastest(blocks), median(blocks), mean(blocks)) == (1.0, 1.0, 1.5)
