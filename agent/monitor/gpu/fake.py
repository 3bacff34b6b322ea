"""This module simulates GPUs for drills and tests; a file describes these GPUs.

The file is JSON. It is read again for each reading of the GPUs, so that a fault can be added while the agent runs::

    {"driver": "fake", "gpus": [{}, {"temperature_c": 95}, {"lost": true}, {"missing": true}]}

``{}`` is a healthy GPU. ``FakeGpu`` and ``FakeGpus`` have all fields.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agent.monitor.gpu.reading import FabricReading, GpuReading, GpusReading, GpuTrouble, NvLinkReading
from everstep.errors import ConfigError

NVLINKS = 18
"""Number of NVLinks of an H100."""


class FakeGpu(BaseModel):
    """A simulated GPU: by default healthy and busy, with the values of an H100."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    missing: bool = False
    """Whether the driver does not list it although it is on the PCI bus."""
    lost: bool = False
    reset_required: bool = False
    denied: bool = False
    bus_id: str = ""
    """PCI address; by default it is derived from the position of the GPU in the list."""
    uuid: str = ""
    name: str = "Fake H100 80GB HBM3"
    temperature_c: int = 45
    memory_temperature_c: int = 50
    power_w: float = 400.0
    utilization: int = 90
    clocks_event_reasons: int = 0
    """NVML's bits for the reasons of a slow clock: 8 hardware, 64 heat, 128 power supply."""
    ecc_uncorrected: int = 0
    ecc_corrected: int = 0
    remap_pending: bool = False
    remap_failed: bool = False
    recovery_action: int = 0
    pcie_width: int = 16
    pcie_replays: int = 0
    nvlinks_down: list[int] = Field(default_factory=list)
    """Numbers, from 0 to 17, of the links that are down."""
    nvlink_crc_errors: int = 0
    """Number of errors of each link."""
    nvlink_recoveries: int = 0
    fabric_state: int = 3
    fabric_status: int = 0
    fabric_health_mask: int = 0
    processes: list[int] = Field(default_factory=list)


class FakeGpus(BaseModel):
    """All simulated GPUs of a machine, and faults of the driver."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    driver: str = "fake"
    gpus: list[FakeGpu] = Field(default_factory=list)
    trouble: Literal["library missing", "driver not loaded", "driver mismatch", "denied", "other"] | None = None
    """Why no GPU can be read; None: GPUs can be read."""
    hang_s: float = Field(default=0.0, ge=0)
    """Time that a reading takes, seconds."""
    crash: bool = False
    """Whether the reading process is killed by a segmentation fault."""


class FakeReader:
    """Reads simulated GPUs.

    Args:
        path: Path of the file that describes them.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> GpusReading:
        """Return the GPUs that the file describes now.

        Raises:
            ConfigError: the file cannot be read, or its contents are wrong.
        """
        described = self._described()
        if described.crash:
            os.kill(os.getpid(), signal.SIGSEGV)
        time.sleep(described.hang_s)
        addresses = [gpu.bus_id or f"0000:{index + 1:02x}:00.0" for index, gpu in enumerate(described.gpus)]
        if described.trouble:
            return GpusReading(GpuTrouble(described.trouble), f"the fake driver: {described.trouble}", on_bus=addresses)
        shown = [(address, gpu) for address, gpu in zip(addresses, described.gpus, strict=True) if not gpu.missing]
        gpus = [_reading(index, address, gpu) for index, (address, gpu) in enumerate(shown)]
        return GpusReading(driver=described.driver, gpus=gpus, on_bus=sorted(addresses))

    def _described(self) -> FakeGpus:
        try:
            return FakeGpus.model_validate_json(self._path.read_bytes())
        except OSError as error:
            raise ConfigError(f"{self._path}: the simulated GPUs cannot be read: {error.strerror}") from error
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(map(str, first["loc"])) or "the file"
            raise ConfigError(f"{self._path}: {field} is {first.get('input')!r}: {first['msg']}") from None


def _reading(index: int, address: str, gpu: FakeGpu) -> GpuReading:
    troubles = {
        GpuTrouble.LOST: gpu.lost,
        GpuTrouble.RESET_REQUIRED: gpu.reset_required,
        GpuTrouble.DENIED: gpu.denied,
    }
    if trouble := next((trouble for trouble, is_set in troubles.items() if is_set), None):
        # As with NVML, not even the PCI address of such a GPU can be read.
        return GpuReading(index, trouble=trouble, text=f"the fake GPU: {trouble}")
    links = [
        NvLinkReading(link, link not in gpu.nvlinks_down, 0, gpu.nvlink_recoveries, gpu.nvlink_crc_errors)
        for link in range(NVLINKS)
    ]
    return GpuReading(
        index=index,
        bus_id=address,
        uuid=gpu.uuid or f"GPU-fake-{address}",
        name=gpu.name,
        shutdown_c=92,
        slowdown_c=87,
        max_c=83,
        memory_max_c=95,
        power_limit_w=700.0,
        sm_clock_mhz=1980,
        memory_used_bytes=0,
        memory_total_bytes=80 << 30,
        remapped_corrected=0,
        remapped_uncorrected=0,
        pcie_generation=5,
        pcie_generation_max=5,
        pcie_width_max=16,
        nvlinks=links,
        fabric=FabricReading(gpu.fabric_state, gpu.fabric_status, gpu.fabric_health_mask, 1),
        **gpu.model_dump(
            include={
                *("temperature_c", "memory_temperature_c", "power_w", "utilization", "clocks_event_reasons"),
                *("ecc_uncorrected", "ecc_corrected", "remap_pending", "remap_failed", "recovery_action"),
                *("pcie_width", "pcie_replays", "processes"),
            }
        ),
    )
