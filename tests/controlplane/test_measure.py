"""The sizes and rates of this computer, for a plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from controlplane import measure
from everstep.model.hardware import Hardware


def interface(sys: Path, name: str, speed: str, *, hardware: bool = True) -> None:
    folder = sys / "class" / "net" / name
    folder.mkdir(parents=True)
    (folder / "speed").write_text(speed)
    if hardware:
        (folder / "device").mkdir()


def port(sys: Path, device: str, rate: str, state: str = "4: ACTIVE") -> None:
    folder = sys / "class" / "infiniband" / device / "ports" / "1"
    folder.mkdir(parents=True)
    (folder / "rate").write_text(rate)
    (folder / "state").write_text(state)


def test_the_fastest_cards_are_for_training(tmp_path: Path) -> None:
    for index in range(4):
        interface(tmp_path, f"eth{index}", "200000\n")
    interface(tmp_path, "mgmt", "1000\n")
    interface(tmp_path, "down", "-1\n")
    interface(tmp_path, "docker0", "400000\n", hardware=False)

    assert measure.cards(tmp_path) == {"cards": 4, "card_gbit_s": 200, "management_gbit_s": 1}


def test_ports_for_rdma_count_before_other_interfaces(tmp_path: Path) -> None:
    for index in range(8):
        port(tmp_path, f"mlx5_{index}", "400 Gb/sec (4X NDR)")
    port(tmp_path, "mlx5_8", "400 Gb/sec (4X NDR)", "1: DOWN")
    interface(tmp_path, "eno1", "10000\n")

    assert measure.cards(tmp_path) == {"cards": 8, "card_gbit_s": 400, "management_gbit_s": 10}


def test_without_a_speed_nothing_is_known(tmp_path: Path) -> None:
    assert measure.cards(tmp_path) == {}
    interface(tmp_path, "eth0", "-1\n")
    assert measure.cards(tmp_path) == {}


def test_what_is_measured_describes_a_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "MOST_BYTES", 1 << 20)
    monkeypatch.setattr(measure, "DISK_BYTES", 1 << 20)
    found = measure.measure(tmp_path, tensor=1 << 18, rounds=1)

    assert Hardware.model_validate(found).model_dump(include=set(found)) == found
    assert {"memory_gb", "cores", "hash_gb_s", "map_write_gb_s", "disk_write_gb_s", "device_gb_s"} <= found.keys()


def test_no_room_is_an_error_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "free", lambda _: 1000)
    with pytest.raises(OSError, match="make it larger"):
        measure.measure_memory()
