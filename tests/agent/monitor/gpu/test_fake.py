"""The description of fake GPUs, and the errors about a wrong description."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agent.monitor.gpu.fake import FakeReader
from agent.monitor.gpu.reading import GpuTrouble
from everstep.errors import ConfigError


def reader(tmp_path: Path, described: Any) -> FakeReader:
    path = tmp_path / "gpus.json"
    path.write_text(described if isinstance(described, str) else json.dumps(described))
    return FakeReader(path)


@pytest.mark.parametrize(
    ("described", "message"),
    [
        ({"gpus": [{}, {"hot": True}]}, "gpus.1.hot is True: Extra inputs are not permitted"),
        ({"gpus": [{"temperature_c": "warm"}]}, "gpus.0.temperature_c is 'warm': Input should be a valid integer"),
        ({"hang_s": -1}, "hang_s is -1: Input should be greater than or equal to 0"),
        ({"trouble": "bored"}, "trouble is 'bored': Input should be 'library missing', 'driver not loaded'"),
        ("{", "the file is b'{': Invalid JSON"),
    ],
)
def test_a_wrong_description_is_told_with_its_place(tmp_path: Path, described: Any, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        reader(tmp_path, described).read()
    assert message in str(raised.value)
    assert str(tmp_path / "gpus.json") in str(raised.value)


def test_no_description_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        FakeReader(tmp_path / "none.json").read()


def test_faults_are_what_the_driver_would_say(tmp_path: Path) -> None:
    described = {"gpus": [{}, {"lost": True}, {"missing": True}, {"reset_required": True}, {"denied": True}]}
    reading = reader(tmp_path, described).read()
    assert [gpu.trouble for gpu in reading.gpus] == [
        None,
        GpuTrouble.LOST,
        GpuTrouble.RESET_REQUIRED,
        GpuTrouble.DENIED,
    ]
    assert [gpu.index for gpu in reading.gpus] == [0, 1, 2, 3], "the driver numbers the GPUs that it shows from 0"
    assert len(reading.on_bus) == 5


def test_a_driver_in_trouble_shows_no_gpu(tmp_path: Path) -> None:
    reading = reader(tmp_path, {"gpus": [{}], "trouble": "driver mismatch"}).read()
    assert (reading.trouble, reading.gpus, len(reading.on_bus)) == (GpuTrouble.MISMATCH, [], 1)
