"""Benchmarks of replaced machines: how measured times are weighted, and when all ranks count as stepping again."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.peers.torchrun_machines import all_stepped
from benchmarks.replacement import Measured, each, rows_of, weighted


def test_losses_are_weighted_as_in_figure_12() -> None:
    assert weighted({1: 2.0, 2: 2.0, 3: 2.0}) == pytest.approx(2.0)
    assert weighted({1: 0.0, 2: 0.0, 3: 100.0}) == pytest.approx(1.0), "a loss of many machines has a weight of 1 %"
    one = weighted({1: 1.0, 2: 0.0, 3: 0.0})
    assert one is not None
    assert 0.99 * 0.92 < one < 0.99 * 0.94, (
        "each of 128 machines fails with a rate of 0.0012 per day, and there are 128 * 127 / 2 pairs"
    )
    assert weighted({1: 2.0, 3: 2.0}) is None


def test_a_side_that_did_not_run_has_no_figure() -> None:
    measured = Measured()
    for count in (1, 2, 3):
        measured.add("standbys", count, 3.0)
        measured.add("requeue", count, 30.0)
    rows = {row.name: row for row in rows_of(measured)}
    assert rows["weighted time, requeue"].ratio == pytest.approx(0.1)
    assert rows["weighted time, reschedule"].met is None
    assert rows["idle standby, share of a core, maximum"].ours is None
    assert "reschedule                             -       -       -" in each(measured)


def test_ranks_step_again_once_new_processes_of_all_have_stepped(tmp_path: Path) -> None:
    (tmp_path / "0-0").write_text("started 1\nstep 2\nstep 12\nstarted 20\nimported 21\n")
    (tmp_path / "1-0").write_text("started 1\nstep 2\nstarted 19\nimported 21\nstep 23\nstep 24\n")
    assert all_stepped(tmp_path, 2, 0) == 2
    assert all_stepped(tmp_path, 2, 10) == 0, (
        "step 12 is of the old process of rank 0, and its new process has not stepped"
    )
    with (tmp_path / "0-0").open("a") as file:
        file.write("step 25\n")
    assert all_stepped(tmp_path, 2, 10) == 25
    assert all_stepped(tmp_path, 3, 10) == 0
