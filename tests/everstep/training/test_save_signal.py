"""The save signal wakes its reader, and never makes a rank wait."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from everstep.training import save_signal as module
from everstep.training.save_signal import SaveSignal


@pytest.fixture
def fifo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A FIFO. After a failure, the signal opens it again without delay."""
    monkeypatch.setattr(module, "REOPEN_S", 0.0)
    path = tmp_path / "signal"
    os.mkfifo(path)
    return path


def listen(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_NONBLOCK)


def test_a_signal_is_one_byte(fifo: Path) -> None:
    reader, signal = listen(fifo), SaveSignal(fifo)
    signal.send()
    signal.send()
    assert len(os.read(reader, 100)) == 2
    os.close(reader)
    signal.close()


def test_a_signal_without_a_reader_is_lost_and_later_ones_arrive(fifo: Path) -> None:
    signal = SaveSignal(fifo)
    signal.send()
    reader = listen(fifo)
    signal.send()
    assert len(os.read(reader, 100)) == 1
    os.close(reader)
    signal.send()  # the agent died, so nothing reads
    reader = listen(fifo)
    signal.send()
    assert len(os.read(reader, 100)) == 1
    os.close(reader)
    signal.close()


def test_a_full_pipe_does_not_delay_the_sender(fifo: Path) -> None:
    reader, signal = listen(fifo), SaveSignal(fifo)
    for _ in range(70_000):  # a pipe holds only 64 KiB
        signal.send()
    assert len(os.read(reader, 1 << 20)) == 1 << 16
    signal.send()
    assert len(os.read(reader, 100)) == 1
    os.close(reader)
    signal.close()


def test_a_failed_open_of_the_fifo_is_not_repeated_at_once(fifo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REOPEN_S", 3600.0)
    signal = SaveSignal(fifo)
    signal.send()
    reader = listen(fifo)
    signal.send()
    assert os.read(reader, 100) == b""
    os.close(reader)


def test_without_a_fifo_nothing_happens() -> None:
    SaveSignal(None).send()
