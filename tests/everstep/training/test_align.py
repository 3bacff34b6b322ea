"""When a rank waits at the end of a step, and when it continues."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from everstep.rank import step_reports
from everstep.rank.step_reports import ReportFile
from everstep.training.run import wait_aligned


@pytest.fixture
def reports(tmp_path: Path) -> ReportFile:
    return ReportFile.create(tmp_path / "report", rank=0, generation=1, capacity=4)


@pytest.mark.parametrize(("step", "completed", "asked"), [(0, 5, False), (6, 5, False), (5, 5, True), (4, 5, True)])
def test_it_waits_once_it_has_come_so_far(reports: ReportFile, step: int, completed: int, asked: bool) -> None:
    reports.align(step)
    assert reports.alignment().is_asked(completed) is asked


def test_it_goes_on_when_nobody_asks_any_more_and_does_not_wait_for_the_same_again(
    reports: ReportFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_reports, "REQUEST_VALID_S", 0.2)
    reports.align(3)
    began = time.monotonic()
    wait_aligned(reports, 3)
    assert time.monotonic() - began >= 0.15
    assert not reports.alignment().is_asked(4)
    reports.align(3)
    assert reports.alignment().is_asked(4), "this is a new request"


def test_it_says_that_it_waits_until_it_is_let_go(reports: ReportFile) -> None:
    reports.align(3)
    waiting = threading.Thread(target=wait_aligned, args=(reports, 4))
    waiting.start()
    while not reports.alignment().aligned:
        time.sleep(0.001)
    assert reports.alignment().aligned == 4
    reports.align(0)
    waiting.join(10)
    assert (waiting.is_alive(), reports.alignment().aligned) == (False, 0)
