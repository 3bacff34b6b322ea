"""Fixtures of the integrations' tests: the files and environment of a rank, and a job."""

from __future__ import annotations

import pytest
import torch

from tests.everstep.integrations.driven import Job
from tests.everstep.training.conftest import StartRank, outside, shm, start_rank

__all__ = ["outside", "shm", "start_rank"]


@pytest.fixture
def job(start_rank: StartRank, monkeypatch: pytest.MonkeyPatch) -> Job:
    """Return a job that has not started yet."""
    torch.set_num_threads(1)
    return Job(start_rank, monkeypatch)
