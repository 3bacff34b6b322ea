"""What every reader of GPUs must do: the real one and the fake one, both in the reading process."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.monitor.gpu.fake import FakeReader
from agent.monitor.gpu.inspection import GpuInspection
from agent.monitor.gpu.process import GpuProcess
from agent.monitor.gpu.reading import GpusReading, GpuTrouble
from agent.monitor.gpu.rules.rule import GpuLimits
from agent.monitor.inspection import Site

PLACE = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
PATIENCE_S = 60.0
NO_GPU = (GpuTrouble.LIBRARY_MISSING, GpuTrouble.NO_DRIVER)


@pytest.fixture
def fake(tmp_path: Path) -> Path:
    path = tmp_path / "gpus.json"
    path.write_text(json.dumps({"gpus": [{}, {"temperature_c": 60}]}))
    return path


@pytest.fixture
def process() -> Iterator[list[GpuProcess]]:
    started: list[GpuProcess] = []
    yield started
    for one in started:
        assert one.end()


def holds(process: GpuProcess) -> GpusReading:
    """Check the contract with GPUs that are present."""
    first, second = (process.read(PATIENCE_S, PATIENCE_S) for _ in range(2))
    assert first.trouble is None
    assert first.driver
    assert [gpu.index for gpu in first.gpus] == list(range(len(first.gpus)))
    assert len({gpu.bus_id for gpu in first.gpus}) == len({gpu.uuid for gpu in first.gpus}) == len(first.gpus) > 0
    for before, gpu in zip(first.gpus, second.gpus, strict=True):
        assert (gpu.index, gpu.bus_id, gpu.uuid, gpu.name) == (before.index, before.bus_id, before.uuid, before.name)
        assert PLACE.fullmatch(gpu.bus_id)
        assert gpu.name
        assert gpu.trouble is None
        assert gpu.errors == {}
        assert gpu.temperature_c is not None and 0 < gpu.temperature_c < 120
        if gpu.pcie_width and gpu.pcie_width_max:
            assert gpu.pcie_width <= gpu.pcie_width_max
        if gpu.memory_used_bytes is not None and gpu.memory_total_bytes is not None:
            assert 0 <= gpu.memory_used_bytes <= gpu.memory_total_bytes
        assert len({one.link for one in gpu.nvlinks}) == len(gpu.nvlinks)
        for counter in ("ecc_uncorrected", "ecc_corrected", "pcie_replays"):
            assert (getattr(gpu, counter) or 0) >= (getattr(before, counter) or 0)
    return second


def test_fake_gpus(fake: Path, process: list[GpuProcess]) -> None:
    process.append(GpuProcess(["--fake", str(fake)]))
    reading = holds(process[0])
    assert reading == FakeReader(fake).read(), "the reading process does not change the reading"


def test_real_gpus(process: list[GpuProcess]) -> None:
    """On a machine with GPUs, this reads real GPUs through all layers."""
    process.append(GpuProcess())
    reading = process[0].read(PATIENCE_S, PATIENCE_S)
    if reading.trouble in NO_GPU or not (reading.gpus or reading.trouble):
        pytest.skip(f"no NVIDIA GPU can be read here: {reading.text or 'the driver shows none'}")
    reading = holds(process[0])
    inspection = GpuInspection(Site(), GpuLimits(), {}, same_boot=True)
    result = inspection.inspect()
    assert inspection._process.end()
    assert sum(name.startswith("DCGM_FI_DEV_GPU_TEMP{") for name in result.measures) == len(reading.gpus)
    assert result.facts["nvidia driver"] == reading.driver
    assert "gpu-unreadable" not in {found.reason for found in result.findings}
