"""This module lists the NVIDIA GPUs on the PCI bus from sysfs, which also shows GPUs that have no driver or failed.

A container sees all devices of its machine in sysfs, but has device nodes only for those that it may use. A cgroup may
forbid the use of a device node (Slurm's ``ConstrainDevices``): the kernel then denies the access, even to root. A GPU
with a driver should therefore be readable if its device node may be used. A GPU has no driver if the driver gave it up.
Such a GPU should be readable if all other GPUs of the machine are; otherwise it may be for another container or user.
"""

from __future__ import annotations

import os
from pathlib import Path

from everstep.system.procfs import nvidia_driver, nvidia_gpus

VENDOR = "0x10de"
CLASSES = ("0x0300", "0x0302")
"""Beginnings of the PCI classes of display controllers, with and without an output."""
DRIVER = "nvidia"


def on_bus(sys: Path) -> dict[str, str]:
    """Return the PCI address of each NVIDIA GPU, with the name of its driver; empty: it has no driver.

    Args:
        sys: Path of /sys.
    """
    found = {}
    for device in sorted((sys / "bus/pci/devices").glob("*")):
        try:
            is_gpu = (device / "vendor").read_text().strip() == VENDOR
            if is_gpu and (device / "class").read_text().startswith(CLASSES):
                driver = device / "driver"
                found[device.name.lower()] = driver.readlink().name if driver.is_symlink() else ""
        except OSError:
            continue  # the device was removed meanwhile
    return found


def expected(sys: Path, proc: Path, dev: Path) -> list[str]:
    """Return the PCI addresses of the GPUs that should be readable on this machine or in this container."""
    usable, others = usable_and_others(sys, proc, dev)
    given_up = [] if others or not usable else [address for address, driver in on_bus(sys).items() if not driver]
    return sorted([*usable, *given_up])


def usable_and_others(sys: Path, proc: Path, dev: Path) -> tuple[list[str], list[str]]:
    """Return the PCI addresses of GPUs with a driver, in two lists: GPUs to be used here, and GPUs for others."""
    minors = {address: gpu.get("Device Minor") for address, gpu in nvidia_gpus(proc).items()}
    usable: list[str] = []
    others: list[str] = []
    for address, driver in on_bus(sys).items():
        if driver == DRIVER:
            may_use = os.access(dev / f"nvidia{minors.get(address)}", os.R_OK | os.W_OK)
            (usable if may_use else others).append(address)
    return usable, others


def worth_reading(sys: Path, proc: Path, dev: Path) -> bool:
    """Return whether the machine has an NVIDIA GPU or its driver."""
    return bool(nvidia_driver(proc)) or (dev / "nvidiactl").exists() or bool(on_bus(sys))


def all_have_drivers(sys: Path) -> bool:
    """Return whether each GPU has a driver. If NVML's library is missing too, the GPUs are for other containers."""
    return all(on_bus(sys).values())
