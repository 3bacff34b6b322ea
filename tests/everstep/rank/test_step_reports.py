"""Step reports through mapped memory."""

from __future__ import annotations

import errno
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.errors import EverstepError
from everstep.rank.step_reports import MILESTONES, RING, Alignment, ReportFile
from everstep.system.end_notice import ROOM
from tests.everstep.system.test_shared_words import LOW, seen_beside


def fresh(path: Path, capacity: int = 16) -> ReportFile:
    return ReportFile.create(path / "report", rank=3, generation=2, capacity=capacity)


def test_a_reader_sees_what_the_writer_reported(tmp_path: Path) -> None:
    writer = fresh(tmp_path)
    reader = ReportFile.open(tmp_path / "report")
    assert (reader.rank, reader.generation) == (3, 2)
    before = reader.snapshot()
    assert (before.completed_steps, before.attached, before.finished, before.newest) == (-1, False, False, None)
    writer.set_pid(42)
    writer.attach()
    writer.report(7, 1.25, math.nan, 100)
    writer.complete(8)
    writer.finish()
    seen = reader.snapshot()
    assert (seen.pid, seen.attached, seen.finished, seen.completed_steps, seen.published) == (42, True, True, 8, 1)
    assert seen.newest is not None
    assert (seen.newest.step, seen.newest.loss, seen.newest.tokens) == (7, 1.25, 100)
    assert math.isnan(seen.newest.grad_norm)


def test_the_time_of_the_last_step_is_known_with_and_without_reports(tmp_path: Path) -> None:
    writer = fresh(tmp_path)
    assert writer.snapshot().stepped_ns == 0
    before = time.time_ns()
    writer.count_optimizer_step()
    optimizer = writer.snapshot().stepped_ns
    assert before <= optimizer <= time.time_ns()
    writer.complete(1)
    assert writer.snapshot().stepped_ns == optimizer, "``complete`` does not count as another step"
    writer.report(0, 1.0, 1.0, 0)
    newest = writer.snapshot().newest
    assert newest and writer.snapshot().stepped_ns == newest.time_ns >= optimizer


def test_an_agent_asks_a_rank_to_wait_and_reads_the_answer(tmp_path: Path) -> None:
    rank = fresh(tmp_path)
    agent = ReportFile.open(tmp_path / "report")
    assert agent.alignment() == Alignment(), "no step is requested from the rank yet"
    before = time.monotonic_ns()
    agent.align(7)
    assert rank.align_step() == 7
    rank.can_align()
    rank.set_aligned(7)
    seen = agent.alignment()
    assert (seen.step, seen.aligned, seen.can) == (7, 7, True)
    assert before <= seen.asked_ns <= time.monotonic_ns()
    agent.align(0)
    assert rank.align_step() == 0
    rank.set_aligned(0)
    assert agent.alignment()[::2] == (0, 0)


def test_only_the_first_time_at_a_milestone_counts(tmp_path: Path) -> None:
    file = fresh(tmp_path)
    for name in MILESTONES:
        file.mark(name)
    first = file.snapshot().milestones
    for name in MILESTONES:
        file.mark(name)
    assert file.snapshot().milestones == first
    assert list(first.values()) == sorted(first.values()) and all(first.values())


@given(st.integers(2, 20), st.lists(st.integers(0, 12), max_size=12))
def test_a_reader_gets_every_record_once_and_in_order_unless_lapped(capacity: int, bursts: list[int]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        writer = fresh(Path(folder), capacity)
        reader = ReportFile.open(Path(folder) / "report")
        at, written, read = 0, 0, 0
        for burst in bursts:
            for _ in range(burst):
                writer.report(written, float(written), 0.0, 0)
                written += 1
            at, records = reader.records(at)
            assert at == written
            kept = min(burst, capacity - 1)
            assert [record.step for record in records] == list(range(written - kept, written))
            assert all(record.loss == record.step for record in records)
            read += len(records)


def test_the_writer_survives_a_dead_reader_and_a_restarted_writer_continues(tmp_path: Path) -> None:
    writer = fresh(tmp_path)
    reader = "import sys; from pathlib import Path; from everstep.rank.step_reports import ReportFile; "
    reader += "print(ReportFile.open(Path(sys.argv[1])).snapshot().published); import os; os.kill(os.getpid(), 9)"
    for count in range(3):
        writer.report(count, 0.0, 0.0, 0)
        process = subprocess.run([sys.executable, "-c", reader, str(writer.path)], capture_output=True, check=False)
        assert process.returncode == -9
    again = ReportFile.open(writer.path)
    again.report(3, 0.0, 0.0, 0)
    assert [record.step for record in writer.records(0)[1]] == [0, 1, 2, 3]


def test_a_full_disk_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space"):
        fresh(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", [b"", b"x" * 100, b"x" * (RING + 64)])
def test_a_damaged_file_is_refused_with_its_name(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "report").write_bytes(damage)
    with pytest.raises(EverstepError, match=r"report.*delete it"):
        ReportFile.open(tmp_path / "report")


def test_a_truncated_ring_is_refused(tmp_path: Path) -> None:
    path = fresh(tmp_path).path
    path.write_bytes(path.read_bytes()[: -(ROOM + 1)])
    with pytest.raises(EverstepError, match="delete it"):
        ReportFile.open(path)


def test_the_agent_never_reads_a_part_of_a_step_count(tmp_path: Path) -> None:
    rank = ReportFile.create(tmp_path / "report", rank=0, generation=1)
    rank.complete(LOW)
    agent = ReportFile.open(tmp_path / "report")
    assert seen_beside(rank.complete, lambda: agent.snapshot().completed_steps, 2) == set()
