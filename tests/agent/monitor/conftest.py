"""A simulated machine, made of files, for each test."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.agent.monitor.sites import SimulatedMachine


@pytest.fixture
def machine(tmp_path: Path) -> SimulatedMachine:
    return SimulatedMachine(tmp_path)
