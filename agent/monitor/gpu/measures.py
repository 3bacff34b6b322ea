"""What a reading gives for metrics, with the names and units of dcgm-exporter where it has them."""

from __future__ import annotations

from collections.abc import Iterable

from agent.monitor.gpu.reading import GpuReading, GpusReading

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
    told = {
        "nvidia driver": reading.driver,
        "gpus": f"{len(reading.gpus)} {' and '.join(models)}" if models else "",
        "gpu power limit": " and ".join(f"{limit} W" for limit in limits),
    }
    return {name: value for name, value in told.items() if value}


def _of_one(gpu: GpuReading) -> Iterable[tuple[str, float]]:
    for field, name in FIELDS.items():
        if (value := getattr(gpu, field)) is not None:
            yield name, float(value)
    if gpu.memory_used_bytes is not None:
        yield "DCGM_FI_DEV_FB_USED", gpu.memory_used_bytes / MEBIBYTE
    for field, name in OF_LINKS.items():
        values = [value for one in gpu.nvlinks if (value := getattr(one, field)) is not None]
        if values:
            yield name, float(sum(values))
    if gpu.nvlinks:
        yield "gpu_nvlinks_up", float(sum(one.up for one in gpu.nvlinks))
    if gpu.processes is not None:
        yield "gpu_processes", float(len(gpu.processes))


def _labels(gpu: GpuReading) -> str:
    return f'{{gpu="{gpu.index}",UUID="{gpu.uuid}",pci_bus_id="{gpu.bus_id}",modelName="{gpu.name}"}}'
