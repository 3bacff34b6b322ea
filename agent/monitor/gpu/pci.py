"""The NVIDIA GPUs on PCI, as the kernel lists them: there without a driver, and after a GPU has failed.

A container sees all devices of its machine in sysfs and may use those that were given to it: for these it has a
device node. So a GPU with a driver counts as one that should be readable only where its node is; one whose driver
gave it up does, where other GPUs have theirs.
"""

from __future__ import annotations

from pathlib import Path

from everstep.system.procfs import nvidia_driver, nvidia_gpus

VENDOR = "0x10de"
CLASSES = ("0x0300", "0x0302")
"""Display controllers with and without an output; the last two digits are the programming interface."""
DRIVER = "nvidia"


def on_bus(sys: Path) -> dict[str, str]:
    """Place on PCI → name of its driver, empty where none has it; of all NVIDIA GPUs.

    Args:
        sys: Where /sys is.
    """
    found = {}
    for device in sorted((sys / "bus/pci/devices").glob("*")):
        try:
            is_gpu = (device / "vendor").read_text().strip() == VENDOR
            if is_gpu and (device / "class").read_text().startswith(CLASSES):
                driver = device / "driver"
                found[device.name.lower()] = driver.readlink().name if driver.is_symlink() else ""
        except OSError:
            continue  # it went away meanwhile
    return found


def expected(sys: Path, proc: Path, dev: Path) -> list[str]:
    """Places on PCI of the GPUs that should be readable here."""
    drivers = on_bus(sys)
    minors = {place: gpu.get("Device Minor") for place, gpu in nvidia_gpus(proc).items()}
    given = [
        place for place, driver in drivers.items() if driver == DRIVER and (dev / f"nvidia{minors.get(place)}").exists()
    ]
    given_up = [place for place, driver in drivers.items() if not driver] if given else []
    return sorted([*given, *given_up])


def worth_reading(sys: Path, proc: Path, dev: Path) -> bool:
    """Whether there is anything of an NVIDIA GPU here."""
    return bool(nvidia_driver(proc)) or (dev / "nvidiactl").exists() or bool(on_bus(sys))


def all_have_drivers(sys: Path) -> bool:
    """Whether each GPU on PCI has a driver: where NVML's library is missing too, they are for others to use."""
    return all(on_bus(sys).values())
