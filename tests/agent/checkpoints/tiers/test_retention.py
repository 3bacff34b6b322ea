"""The notes of a machine about its disk, after the job has ended."""

from __future__ import annotations

import shutil
from pathlib import Path

from agent.checkpoints.options import LaunchOptions, Place
from agent.checkpoints.saved_state import SavedStates
from agent.checkpoints.tiers.retention import NAME, DiskRetention
from agent.v1 import agent_pb2 as pb

LAUNCH = LaunchOptions(1, 0, (0,), pb.CheckpointOptions(disk_keep=2), topology="1,1,1,1,pp-dp-tp")


def test_a_writer_that_ends_after_its_job_brings_back_no_folder(tmp_path: Path) -> None:
    shm = tmp_path / "gpt"
    retention = DiskRetention(Place("gpt", "m0", shm, tmp_path, SavedStates()))
    retention.open(LAUNCH, [])
    retention.wrote(3)
    assert (shm / NAME).exists()
    retention.close()
    shutil.rmtree(shm)
    retention.wrote(4)  # a thread that is still writing calls this after the close
    retention.passed(5)
    assert not shm.exists()
    retention.open(LAUNCH, [3])
    assert (shm / NAME).exists()
