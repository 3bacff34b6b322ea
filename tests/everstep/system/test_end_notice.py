"""The kernel's notice that a process begins to end, for each way in which a process may end."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.rank.step_reports import ReportFile
from everstep.system import end_notice
from everstep.system.end_notice import EndNotice

OWNER = """
import os, sys, threading, time
from pathlib import Path
from everstep.rank.step_reports import ReportFile
report = ReportFile.open(Path(sys.argv[1]))
assert report.arm_end_notice()
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
if os.fork() == 0:
    os._exit(0)  # the end of a child is not the end of the owner
os.wait()
print(flush=True)
sys.stdin.readline()
exec(sys.argv[2])
"""


@pytest.fixture
def report(tmp_path: Path) -> Iterator[ReportFile]:
    found = ReportFile.create(tmp_path / "report", rank=0, generation=1, capacity=16)
    yield found
    found.close()


def owner(report: ReportFile, ends_by: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", OWNER, str(report.path), ends_by]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout and process.stdout.readline()
    return process


class Waiting:
    """A thread that waits for the owner's end."""

    def __init__(self, notice: EndNotice) -> None:
        self.notice, self.told = notice, list[bool]()
        self._thread = threading.Thread(target=lambda: self.told.append(notice.wait()), daemon=True)
        self._thread.start()

    @property
    def waits(self) -> bool:
        self._thread.join(0.2)
        return self._thread.is_alive()

    def done(self) -> list[bool]:
        self._thread.join(30)
        assert not self._thread.is_alive()
        return self.told


def notice_of(report: ReportFile) -> EndNotice:
    found = report.end_notice()
    assert found is not None
    return found


@pytest.mark.parametrize("ends_by", ["os.kill(os.getpid(), 9)", "os.abort()", "os._exit(3)", "raise ValueError"])
def test_who_waits_is_told_however_the_owner_ends(report: ReportFile, ends_by: str) -> None:
    waiting = Waiting(notice_of(report))
    assert waiting.waits, "there is no owner yet"
    with owner(report, ends_by) as process:
        assert waiting.waits
        assert process.stdin
        process.stdin.write("\n")
        process.stdin.flush()
        assert waiting.done() == [True]
    assert Waiting(notice_of(report)).done() == [True], "a thread that waits only after the end gets the notice, too"


def test_one_that_is_dropped_does_not_wait_for_ever(report: ReportFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(end_notice, "CHECK_S", 0)
    waiting = Waiting(notice_of(report))
    waiting.notice.dropped = True
    assert waiting.done() == [False]
