"""This module has the data of one reading of all GPUs, and the metrics of a reading.

The reading process sends a reading to the agent as one line of JSON. A value that the device, the driver or the library
does not support is None, which is never reported as a fault. If dcgm-exporter has a metric too, the metric has the name
and the unit of dcgm-exporter.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

MEBIBYTE = 1 << 20
FIELDS = {
    "temperature_c": "DCGM_FI_DEV_GPU_TEMP",
    "memory_temperature_c": "DCGM_FI_DEV_MEMORY_TEMP",
    "power_w": "DCGM_FI_DEV_POWER_USAGE",
    "power_limit_w": "DCGM_FI_DEV_ENFORCED_POWER_LIMIT",
    "sm_clock_mhz": "DCGM_FI_DEV_SM_CLOCK",
    "utilization": "DCGM_FI_DEV_GPU_UTIL",
    "clocks_event_reasons": "DCGM_FI_DEV_CLOCKS_EVENT_REASONS",
    "ecc_uncorrected": "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL",
    "ecc_corrected": "DCGM_FI_DEV_ECC_SBE_VOL_TOTAL",
    "remapped_corrected": "DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS",
    "remapped_uncorrected": "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS",
    "remap_pending": "DCGM_FI_DEV_ROW_REMAP_PENDING",
    "remap_failed": "DCGM_FI_DEV_ROW_REMAP_FAILURE",
    "pcie_generation": "DCGM_FI_DEV_PCIE_LINK_GEN",
    "pcie_width": "DCGM_FI_DEV_PCIE_LINK_WIDTH",
    "pcie_replays": "DCGM_FI_DEV_PCIE_REPLAY_COUNTER",
}
"""Field of a reading → name of its metric."""
OF_LINKS = {
    "replays": "DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL",
    "recoveries": "DCGM_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL",
    "crc_errors": "DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL",
}
"""Field of an NVLink → name of the metric, which is the sum over all links of a GPU."""
MEMORY_USED = "DCGM_FI_DEV_FB_USED"
EXPORTED = (*FIELDS.values(), *OF_LINKS.values(), MEMORY_USED)
"""All metrics that have names of dcgm-exporter."""


class GpuTrouble(StrEnum):
    """Why a GPU, or all of them, cannot be read."""

    LIBRARY_MISSING = "library missing"
    """NVML's library is not installed (error 12)."""
    NO_DRIVER = "driver not loaded"
    """The library is installed, and the kernel's driver is not loaded (error 9)."""
    MISMATCH = "driver mismatch"
    """Library and driver have different releases (error 18)."""
    DENIED = "denied"
    """The agent is not permitted to read the GPU (error 4)."""
    LOST = "lost"
    """The GPU has fallen off the bus (error 15)."""
    RESET_REQUIRED = "reset required"
    """The GPU has to be reset before it can be used again (error 16)."""
    NO_POWER = "no power"
    """The external power of the GPU is not connected (error 8)."""
    OTHER = "other"
    """Another error, which the text describes."""


@dataclass(slots=True)
class NvLinkReading:
    """One NVLink of a GPU."""

    link: int
    """Number of the link, from 0."""
    up: bool = True
    replays: int | None = None
    """Repeated transmissions since the driver was loaded."""
    recoveries: int | None = None
    """How often the link was trained anew."""
    crc_errors: int | None = None
    """Flow control units with a wrong checksum."""


@dataclass(slots=True)
class FabricReading:
    """The state of a GPU in the NVSwitch fabric, in NVML's numbers."""

    state: int = 0
    """State of the registration: 0 not supported, 1 not started, 2 in progress, 3 completed."""
    status: int = 0
    """Error code of a completed registration; 0: it succeeded."""
    health_mask: int = 0
    summary: int = 0
    """0 unknown, 1 healthy, 2 unhealthy, 3 limited capacity."""


@dataclass(slots=True)
class GpuReading:
    """One GPU."""

    index: int
    """NVML's number of the GPU."""
    bus_id: str = ""
    """PCI address as in sysfs, e.g. ``0000:05:00.0``; empty: it could not be read."""
    uuid: str = ""
    name: str = ""
    trouble: GpuTrouble | None = None
    """Why the GPU cannot be read. If there is a trouble, all fields after ``text`` are missing."""
    text: str = ""
    """NVML's message about the trouble."""
    temperature_c: int | None = None
    memory_temperature_c: int | None = None
    shutdown_c: int | None = None
    """Temperature at which the device is shut down."""
    slowdown_c: int | None = None
    """Temperature at which the hardware slows the device down."""
    max_c: int | None = None
    """Temperature at which the driver slows the device down."""
    memory_max_c: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    """The enforced limit."""
    sm_clock_mhz: int | None = None
    utilization: int | None = None
    """Share of the last sampling period in which a kernel ran on the GPU, per cent."""
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    clocks_event_reasons: int | None = None
    """Why the clock of the GPU is reduced: NVML's bits."""
    ecc_uncorrected: int | None = None
    """Memory errors since the driver was loaded or the GPU was reset (volatile)."""
    ecc_corrected: int | None = None
    remapped_corrected: int | None = None
    """Number of memory rows that were ever replaced because of corrected errors."""
    remapped_uncorrected: int | None = None
    """Number of memory rows that were ever replaced because of uncorrected errors."""
    remap_pending: bool | None = None
    """A row will be replaced at the next reset."""
    remap_failed: bool | None = None
    """A row could not be replaced."""
    recovery_action: int | None = None
    """Action that the driver requests: 0 none, 1 reset, 2 reboot, 3 drain P2P, 4 drain and reset, 5 recover IMEX, 6 bus
    reset, 7 system reboot."""
    pcie_generation: int | None = None
    pcie_generation_max: int | None = None
    """The highest generation that device and machine support together."""
    pcie_width: int | None = None
    """Number of lanes."""
    pcie_width_max: int | None = None
    pcie_replays: int | None = None
    """Repeated transmissions since the GPU was reset."""
    nvlinks: list[NvLinkReading] = field(default_factory=list)
    fabric: FabricReading | None = None
    processes: list[int] | None = None
    """Pids, in the machine's own namespace, of the processes that compute on the GPU."""
    errors: dict[str, str] = field(default_factory=dict)
    """Field that could not be read, although it is supported and permitted → the error."""


@dataclass(slots=True)
class GpusReading:
    """All GPUs of a machine at one time."""

    trouble: GpuTrouble | None = None
    """Why no GPU can be read."""
    text: str = ""
    """NVML's message about the trouble."""
    driver: str = ""
    """Version of the driver."""
    gpus: list[GpuReading] = field(default_factory=list)
    on_bus: list[str] = field(default_factory=list)
    """PCI addresses of the GPUs that should be readable (``agent.monitor.gpu.pci``)."""


class GpuReader(Protocol):
    """Reads GPUs: those of the machine (``nvml``) or simulated ones (``fake``)."""

    def read(self) -> GpusReading:
        """Read all GPUs; the call may hang, and errors are part of the reading."""


def to_json(reading: GpusReading) -> str:
    """Return a reading as one line of JSON."""
    return json.dumps(dataclasses.asdict(reading))


def part_of(bus_id: str) -> str:
    """Shorten a PCI address to the form of the kernel log: ``00000000:1A:00.0`` becomes ``0000:1a:00``."""
    domain, _, rest = bus_id.lower().split(".")[0].partition(":")
    return f"{domain.removeprefix('0000') or '0000'}:{rest}" if rest else bus_id


def item_of(bus_id: str, index: int) -> str:
    """Return the name of a GPU in findings: its PCI address as in the kernel log, or else its number."""
    return f"GPU {part_of(bus_id)}" if bus_id else f"GPU {index}"


def measures(reading: GpusReading) -> dict[str, float]:
    """Return the metrics of a reading, with labels; values that cannot be read are left out."""
    found = {} if reading.trouble else {"gpu_count": float(len(reading.gpus))}
    for gpu in reading.gpus:
        if gpu.trouble is None:
            found |= {f"{name}{_labels(gpu)}": value for name, value in _of_one(gpu)}
    return found


def facts(reading: GpusReading) -> dict[str, str]:
    """Return the properties that should be equal on all machines of a job."""
    models = sorted({gpu.name for gpu in reading.gpus if gpu.name})
    limits = sorted({round(gpu.power_limit_w) for gpu in reading.gpus if gpu.power_limit_w})
    found = {
        "nvidia driver": reading.driver,
        "gpus": f"{len(reading.gpus)} {' and '.join(models)}" if models else "",
        "gpu power limit": " and ".join(f"{limit} W" for limit in limits),
    }
    return {name: value for name, value in found.items() if value}


def _of_one(gpu: GpuReading) -> Iterable[tuple[str, float]]:
    for attribute, name in FIELDS.items():
        if (value := getattr(gpu, attribute)) is not None:
            yield name, float(value)
    if gpu.memory_used_bytes is not None:
        yield MEMORY_USED, gpu.memory_used_bytes / MEBIBYTE
    for attribute, name in OF_LINKS.items():
        values = [value for link in gpu.nvlinks if (value := getattr(link, attribute)) is not None]
        if values:
            yield name, float(sum(values))
    if gpu.nvlinks:
        yield "gpu_nvlinks_up", float(sum(link.up for link in gpu.nvlinks))
    if gpu.processes is not None:
        yield "gpu_processes", float(len(gpu.processes))


def _labels(gpu: GpuReading) -> str:
    return f'{{gpu="{gpu.index}",UUID="{gpu.uuid}",pci_bus_id="{gpu.bus_id}",modelName="{gpu.name}"}}'
