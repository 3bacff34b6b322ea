"""One reading of all GPUs, and its metrics, with the names and units of dcgm-exporter where it has them.

A reading is plain data, which goes as one line of JSON from the process that reads to the agent.

Every value that a device, a driver or a release of the library does not have is None: that is never an alarm.
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
"""Field of a reading → name."""
OF_LINKS = {
    "replays": "DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL",
    "recoveries": "DCGM_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL",
    "crc_errors": "DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL",
}
"""Field of an NVLink → name of the sum over all links of a GPU."""
MEMORY_USED = "DCGM_FI_DEV_FB_USED"
EXPORTED = (*FIELDS.values(), *OF_LINKS.values(), MEMORY_USED)
"""All that have a name of dcgm-exporter."""


class GpuTrouble(StrEnum):
    """Why a GPU, or all of them, cannot be read."""

    LIBRARY_MISSING = "library missing"
    """NVML's library is not there (error 12)."""
    NO_DRIVER = "driver not loaded"
    """The library is there, and the kernel's driver is not (error 9)."""
    MISMATCH = "driver mismatch"
    """Library and driver are of different releases (error 18)."""
    DENIED = "denied"
    """Not permitted (error 4)."""
    LOST = "lost"
    """The GPU has fallen off the bus (error 15)."""
    RESET_REQUIRED = "reset required"
    """The GPU has to be reset before it can be used again (error 16)."""
    NO_POWER = "no power"
    """Its external power is not connected (error 8)."""
    OTHER = "other"
    """Anything else; the text says what."""


@dataclass(slots=True)
class NvLinkReading:
    """One NVLink of a GPU."""

    link: int
    """Its number, from 0."""
    up: bool = True
    replays: int | None = None
    """Transmissions that were repeated, since the driver was loaded."""
    recoveries: int | None = None
    """Times that the link was trained anew."""
    crc_errors: int | None = None
    """Flow control units with a wrong checksum."""


@dataclass(slots=True)
class FabricReading:
    """How a GPU stands with the NVSwitch fabric: NVML's numbers."""

    state: int = 0
    """0 has none, 1 not started, 2 in progress, 3 completed."""
    status: int = 0
    """Error code of the registration, once it is completed; 0: none."""
    health_mask: int = 0
    summary: int = 0
    """0 not known, 1 healthy, 2 unhealthy, 3 limited capacity."""


@dataclass(slots=True)
class GpuReading:
    """One GPU."""

    index: int
    """NVML's number."""
    bus_id: str = ""
    """Place on PCI as sysfs writes it, e.g. ``0000:05:00.0``; empty: it could not be read."""
    uuid: str = ""
    name: str = ""
    trouble: GpuTrouble | None = None
    """Why it cannot be read; what is below is then missing."""
    text: str = ""
    """What NVML said of the trouble."""
    temperature_c: int | None = None
    memory_temperature_c: int | None = None
    shutdown_c: int | None = None
    """The device's own limits, degrees Celsius: at this one it is shut down …"""
    slowdown_c: int | None = None
    """… slowed down by the hardware …"""
    max_c: int | None = None
    """… slowed down by the driver."""
    memory_max_c: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    """As it is enforced."""
    sm_clock_mhz: int | None = None
    utilization: int | None = None
    """Per cent of the last moments in which a kernel ran on it."""
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    clocks_event_reasons: int | None = None
    """Why it runs slower than it could: bits as NVML has them."""
    ecc_uncorrected: int | None = None
    """Memory errors since the driver was loaded or the GPU reset (volatile)."""
    ecc_corrected: int | None = None
    remapped_corrected: int | None = None
    """Rows of memory that were replaced, ever: because of errors that were corrected …"""
    remapped_uncorrected: int | None = None
    """… and that were not."""
    remap_pending: bool | None = None
    """A row will be replaced at the next reset."""
    remap_failed: bool | None = None
    """A row could not be replaced."""
    recovery_action: int | None = None
    """What the driver asks for: 0 nothing, 1 reset, 2 reboot, 3 drain P2P, 4 drain and reset, 5 recover IMEX, 6 bus
    reset, 7 system reboot."""
    pcie_generation: int | None = None
    pcie_generation_max: int | None = None
    """The best that device and machine can do together."""
    pcie_width: int | None = None
    """Lanes."""
    pcie_width_max: int | None = None
    pcie_replays: int | None = None
    """Transmissions that were repeated, since the GPU was reset."""
    nvlinks: list[NvLinkReading] = field(default_factory=list)
    fabric: FabricReading | None = None
    processes: list[int] | None = None
    """Process ids of what computes on it, as the machine itself numbers them."""
    errors: dict[str, str] = field(default_factory=dict)
    """Field → why it could not be read, where it should have been: neither unsupported nor denied."""


@dataclass(slots=True)
class GpusReading:
    """All GPUs, at one time."""

    trouble: GpuTrouble | None = None
    """Why none can be read."""
    text: str = ""
    """What NVML said of the trouble."""
    driver: str = ""
    """Its version."""
    gpus: list[GpuReading] = field(default_factory=list)
    on_bus: list[str] = field(default_factory=list)
    """Places on PCI of GPUs that should be readable here (``agent.monitor.gpu.pci``)."""


class GpuReader(Protocol):
    """Reads GPUs: those of the machine (``nvml``), or described ones (``fake``)."""

    def read(self) -> GpusReading:
        """All GPUs now; may hang, and says what goes wrong in what it returns."""


def to_json(reading: GpusReading) -> str:
    """One line."""
    return json.dumps(dataclasses.asdict(reading))


def part_of(bus_id: str) -> str:
    """A place on PCI as the kernel log names a GPU: ``00000000:1A:00.0`` is ``0000:1a:00``."""
    domain, _, rest = bus_id.lower().split(".")[0].partition(":")
    return f"{domain.removeprefix('0000') or '0000'}:{rest}" if rest else bus_id


def item_of(bus_id: str, index: int) -> str:
    """The name of a GPU in findings, the same as the kernel log's; by its number where its place is not known."""
    return f"GPU {part_of(bus_id)}" if bus_id else f"GPU {index}"


def measures(reading: GpusReading) -> dict[str, float]:
    """All numbers, with labels; what cannot be read is left out."""
    found = {} if reading.trouble else {"gpu_count": float(len(reading.gpus))}
    for gpu in reading.gpus:
        if gpu.trouble is None:
            found |= {f"{name}{_labels(gpu)}": value for name, value in _of_one(gpu)}
    return found


def facts(reading: GpusReading) -> dict[str, str]:
    """What should be the same on all machines of a job."""
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
