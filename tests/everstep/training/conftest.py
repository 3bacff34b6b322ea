"""The files and environment of a rank, as its agent makes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from everstep.rank import environment
from everstep.rank.step_reports import ReportFile
from everstep.slots.file import SlotFile
from everstep.training.checkpoint import Checkpoint
from tests.everstep.training.overlapped import Pause
from tests.everstep.training.recording_cuda import RecordingCuda, stand_in_for_gpu
from tests.shm import shm_folder

StartRank = Callable[..., ReportFile]


@pytest.fixture
def shm() -> Iterator[Path]:
    """A folder in shared memory."""
    with shm_folder() as path:
        yield path


@pytest.fixture
def start_rank(shm: Path, monkeypatch: pytest.MonkeyPatch) -> StartRank:
    """Set the environment for one generation of a job of one rank. Calls return the agent's side of its report file."""

    def start(
        generation: int = 1, *, resume: int = 0, topology: str = "1,1,1,1,pp-dp-tp", slots: int = 2
    ) -> ReportFile:
        reports = ReportFile.create(shm / f"report-0-{generation}", rank=0, generation=generation)
        for name, value in {
            environment.REPORT_FILE: reports.path,
            environment.CHECKPOINT_FILE: shm / "checkpoint-0",
            environment.CHECKPOINT_SLOTS: slots,
            environment.GENERATION: generation,
            environment.RESUME_STEP: resume,
            environment.TOPOLOGY: topology,
            "RANK": 0,
            "LOCAL_RANK": 0,
            "WORLD_SIZE": 1,
        }.items():
            monkeypatch.setenv(name, str(value))
        return reports

    return start


@pytest.fixture
def outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the environment of a script that everstep does not run."""
    for name in (
        environment.REPORT_FILE,
        environment.CHECKPOINT_FILE,
        environment.TOPOLOGY,
        environment.RESUME_STEP,
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
    ):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def make(shm: Path) -> Iterator[Callable[..., Checkpoint]]:
    """Return a function that makes checkpoints that overlap training. They are closed at the end."""
    made = []

    def make(things: Any, pause: Pause | None = None, **options: Any) -> Checkpoint:
        checkpoint = Checkpoint(things, SlotFile(shm / "c"), **{"overlap": True, **options})
        if pause is not None:
            checkpoint.call_midway(pause.meet)
        made.append((checkpoint, pause))
        return checkpoint

    yield make
    for checkpoint, pause in made:
        if pause is not None:
            pause.go.set()
        checkpoint.close()


@pytest.fixture
def gpu() -> Iterator[RecordingCuda]:
    """Return a fake of CUDA. All tensors are copied as if they were on its device 1."""
    with stand_in_for_gpu() as cuda:
        yield cuda
