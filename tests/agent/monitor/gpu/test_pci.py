"""The GPUs that the agent should be able to read. They follow from PCI devices, in folders like those of sysfs."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.monitor.gpu import pci
from agent.monitor.gpu.reading import item_of, part_of

NODES = 2
"""The agent has the device nodes with minor numbers below this number, so 0 and 1."""


class Machine:
    """Folders in place of /sys, /proc and /dev."""

    def __init__(self, root: Path) -> None:
        self.sys, self.proc, self.dev = root / "sys", root / "proc", root / "dev"
        self.dev.mkdir(parents=True)

    def has(self, place: str, driver: str = "nvidia", vendor: str = "0x10de", kind: str = "0x030200") -> None:
        device = self.sys / "bus/pci/devices" / place
        device.mkdir(parents=True)
        (device / "vendor").write_text(f"{vendor}\n")
        (device / "class").write_text(f"{kind}\n")
        if driver:
            (self.sys / "drivers" / driver).mkdir(parents=True, exist_ok=True)
            (device / "driver").symlink_to(self.sys / "drivers" / driver)

    def gives(self, place: str, minor: int) -> None:
        """Let the driver list a GPU; the agent has its device node if ``minor`` is below ``NODES``."""
        folder = self.proc / "driver/nvidia/gpus" / place
        folder.mkdir(parents=True)
        (folder / "information").write_text(f"Model: \t NVIDIA H100\nDevice Minor: \t {minor}\n")
        if minor < NODES:
            (self.dev / f"nvidia{minor}").touch()

    @property
    def expected(self) -> list[str]:
        return pci.expected(self.sys, self.proc, self.dev)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_only_gpus_of_nvidia_count(machine: Machine) -> None:
    machine.has("0000:05:00.0")
    machine.has("0000:06:00.0", kind="0x030000")
    machine.has("0000:07:00.0", kind="0x040300")  # the GPU's audio device
    machine.has("0000:08:00.0", kind="0x068000")  # an NVSwitch
    machine.has("0000:09:00.0", vendor="0x1a03")  # the mainboard's display controller
    assert pci.on_bus(machine.sys) == {"0000:05:00.0": "nvidia", "0000:06:00.0": "nvidia"}


def test_a_machine_without_gpus(machine: Machine) -> None:
    assert not pci.worth_reading(machine.sys, machine.proc, machine.dev)
    assert machine.expected == []


def test_any_file_of_the_driver_is_a_reason_to_read_gpus(machine: Machine) -> None:
    (machine.dev / "nvidiactl").touch()
    assert pci.worth_reading(machine.sys, machine.proc, machine.dev)


def test_a_container_is_expected_to_read_the_gpus_with_device_nodes(machine: Machine) -> None:
    for minor in range(4):
        machine.has(f"0000:0{minor}:00.0")
        machine.gives(f"0000:0{minor}:00.0", minor)
    assert machine.expected == ["0000:00:00.0", "0000:01:00.0"]


def test_a_gpu_that_a_cgroup_forbids_is_not_expected(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    for minor in range(2):
        machine.has(f"0000:0{minor}:00.0")
        machine.gives(f"0000:0{minor}:00.0", minor)
    monkeypatch.setattr("os.access", lambda path, _mode: path.name == "nvidia0")
    assert machine.expected == ["0000:00:00.0"]
    assert pci.usable_and_others(machine.sys, machine.proc, machine.dev) == (["0000:00:00.0"], ["0000:01:00.0"])
    machine.has("0000:06:00.0", driver="")
    assert machine.expected == ["0000:00:00.0"], "a GPU without a driver may also belong to another tenant"


def test_a_gpu_without_a_driver_is_expected_if_all_other_gpus_are_usable(machine: Machine) -> None:
    machine.has("0000:05:00.0")
    machine.gives("0000:05:00.0", 0)
    machine.has("0000:06:00.0", driver="")
    machine.has("0000:07:00.0", driver="vfio-pci")  # this GPU is given to a virtual machine
    assert machine.expected == ["0000:05:00.0", "0000:06:00.0"]
    assert not pci.all_have_drivers(machine.sys)


@pytest.mark.parametrize(
    ("written", "part"),
    [
        ("00000000:1A:00.0", "0000:1a:00"),  # NVML
        ("0000:1a:00.0", "0000:1a:00"),  # sysfs
        ("0000:1A:00", "0000:1a:00"),  # the kernel log
        ("00010000:1A:00.0", "00010000:1a:00"),
        ("0001:01:00.0", "0001:01:00"),
    ],
)
def test_all_spellings_of_an_address_name_the_same_part(written: str, part: str) -> None:
    assert part_of(written) == part
    assert item_of(written, 3) == f"GPU {part}"


def test_a_gpu_without_an_address_has_its_number() -> None:
    assert item_of("", 3) == "GPU 3"
