"""This module reads the GPUs of the machine with NVML, NVIDIA's management library (package nvidia-ml-py).

Only the child process (``agent.monitor.gpu.child``) uses it, because a call may hang in the driver for ever. A value
that the device, the driver or the package does not support is None. The library stays open between readings, because
opening it may take seconds. The agent ends the process if the open library prevents something, e.g. a reset.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pynvml  # type: ignore[import-untyped]

from agent.monitor.gpu import pci
from agent.monitor.gpu.reading import FabricReading, GpuReading, GpusReading, GpuTrouble, NvLinkReading
from everstep.system.procfs import PROC

TROUBLES = {
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: GpuTrouble.LIBRARY_MISSING,
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: GpuTrouble.NO_DRIVER,
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: GpuTrouble.MISMATCH,
    pynvml.NVML_ERROR_NO_PERMISSION: GpuTrouble.DENIED,
    pynvml.NVML_ERROR_GPU_IS_LOST: GpuTrouble.LOST,
    pynvml.NVML_ERROR_RESET_REQUIRED: GpuTrouble.RESET_REQUIRED,
    pynvml.NVML_ERROR_INSUFFICIENT_POWER: GpuTrouble.NO_POWER,
}
ABSENT = (
    pynvml.NVML_ERROR_NOT_SUPPORTED,
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
    pynvml.NVML_ERROR_NO_PERMISSION,
    pynvml.NVML_ERROR_INVALID_ARGUMENT,
    pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
    pynvml.NVML_ERROR_NOT_FOUND,
    pynvml.NVML_ERROR_NO_DATA,
    pynvml.NVML_ERROR_DEPRECATED,
    pynvml.NVML_ERROR_VGPU_ECC_NOT_SUPPORTED,
)
"""Errors that mean that a value is not supported or not permitted, which is no trouble."""
OF_THE_GPU = (
    pynvml.NVML_ERROR_GPU_IS_LOST,
    pynvml.NVML_ERROR_RESET_REQUIRED,
)
"""Errors that are about the GPU and not about the requested value."""
MEMORY_TEMPERATURE = 82
RECOVERY_ACTION = 230
"""Numbers of fields (NVML_FI_DEV_…). Old releases of the package have no name for the second, but can read it."""
MILLIWATT = 1000.0
_THRESHOLD = "nvmlDeviceGetTemperatureThreshold"
_ECC = "nvmlDeviceGetTotalEccErrors"
NUMBERS: dict[str, tuple[Any, ...]] = {
    "temperature_c": ("nvmlDeviceGetTemperature", pynvml.NVML_TEMPERATURE_GPU),
    "shutdown_c": (_THRESHOLD, pynvml.NVML_TEMPERATURE_THRESHOLD_SHUTDOWN),
    "slowdown_c": (_THRESHOLD, pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN),
    "max_c": (_THRESHOLD, pynvml.NVML_TEMPERATURE_THRESHOLD_GPU_MAX),
    "memory_max_c": (_THRESHOLD, pynvml.NVML_TEMPERATURE_THRESHOLD_MEM_MAX),
    "sm_clock_mhz": ("nvmlDeviceGetClockInfo", pynvml.NVML_CLOCK_SM),
    "clocks_event_reasons": ("nvmlDeviceGetCurrentClocksEventReasons",),
    "pcie_generation": ("nvmlDeviceGetCurrPcieLinkGeneration",),
    "pcie_generation_max": ("nvmlDeviceGetMaxPcieLinkGeneration",),
    "pcie_width": ("nvmlDeviceGetCurrPcieLinkWidth",),
    "pcie_width_max": ("nvmlDeviceGetMaxPcieLinkWidth",),
    "pcie_replays": ("nvmlDeviceGetPcieReplayCounter",),
    "ecc_uncorrected": (_ECC, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC),
    "ecc_corrected": (_ECC, pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, pynvml.NVML_VOLATILE_ECC),
}
"""Field of a reading → the call that reads it, and its arguments after the GPU."""
NVLINK_COUNTERS = {
    "replays": pynvml.NVML_NVLINK_ERROR_DL_REPLAY,
    "recoveries": pynvml.NVML_NVLINK_ERROR_DL_RECOVERY,
    "crc_errors": pynvml.NVML_NVLINK_ERROR_DL_CRC_FLIT,
}


class NvmlReader:
    """Reads the GPUs that NVML shows to this process.

    Args:
        sys: Path of /sys.
        proc: Path of /proc.
        dev: Path of /dev.
    """

    def __init__(self, sys: Path = Path("/sys"), proc: Path = PROC, dev: Path = Path("/dev")) -> None:
        self._paths = sys, proc, dev
        self._open = False

    def read(self) -> GpusReading:
        """Read all GPUs; opens the library unless it is open."""
        reading = GpusReading(on_bus=pci.expected(*self._paths))
        try:
            if not self._open:
                pynvml.nvmlInit()
                self._open = True
            reading.driver = str(_ask({}, "driver", "nvmlSystemGetDriverVersion") or "")
            reading.gpus = [_read_one(index) for index in range(pynvml.nvmlDeviceGetCount())]
        except pynvml.NVMLError as error:
            reading.trouble, reading.text = _trouble(error), _message(error)
        return reading


def _trouble(error: Any) -> GpuTrouble:
    return TROUBLES.get(error.value, GpuTrouble.OTHER)


def _message(error: Any) -> str:
    return f"{error} (NVML error {error.value})"


def _ask(errors: dict[str, str], name: str, function: str, *arguments: Any) -> Any:
    """Call NVML and return the value; None: there is no value.

    An error is added to ``errors`` under ``name``, except errors of ``ABSENT``.

    Raises:
        NVMLError: the error is about the GPU and not about the value.
    """
    try:
        return getattr(pynvml, function)(*arguments)
    except AttributeError:
        return None  # the package does not know the call
    except pynvml.NVMLError as error:
        if error.value in OF_THE_GPU:
            raise
        if error.value not in ABSENT:
            errors[name] = _message(error)
        return None


def _read_one(index: int) -> GpuReading:
    gpu = GpuReading(index)
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        pci_info = _ask(gpu.errors, "bus_id", "nvmlDeviceGetPciInfo", handle)
        gpu.bus_id = _address(pci_info.busId) if pci_info else ""
        gpu.uuid = str(_ask(gpu.errors, "uuid", "nvmlDeviceGetUUID", handle) or "")
        gpu.name = str(_ask(gpu.errors, "name", "nvmlDeviceGetName", handle) or "")
        for name, (function, *arguments) in NUMBERS.items():
            value = _ask(gpu.errors, name, function, handle, *arguments)
            setattr(gpu, name, None if value is None else int(value))
        _read_several(gpu, handle)
        _read_fields(gpu, handle)
        gpu.nvlinks = _nvlinks(gpu.errors, handle)
        gpu.fabric = _fabric(gpu.errors, handle)
    except pynvml.NVMLError as error:
        gpu.trouble, gpu.text = _trouble(error), _message(error)
    return gpu


def _address(bus_id: str | bytes) -> str:
    """Convert a PCI address to the form of sysfs: lower case, and a domain of four digits if they suffice."""
    text = (bus_id.decode() if isinstance(bus_id, bytes) else bus_id).lower()
    return text[4:] if text.startswith("0000") and text.find(":") == 8 else text


def _read_several(gpu: GpuReading, handle: Any) -> None:
    """Read the values that are not a single integer."""
    power = _ask(gpu.errors, "power_w", "nvmlDeviceGetPowerUsage", handle)
    limit = _ask(gpu.errors, "power_limit_w", "nvmlDeviceGetEnforcedPowerLimit", handle)
    gpu.power_w = None if power is None else power / MILLIWATT
    gpu.power_limit_w = None if limit is None else limit / MILLIWATT
    if memory := _ask(gpu.errors, "memory_used_bytes", "nvmlDeviceGetMemoryInfo", handle):
        gpu.memory_used_bytes, gpu.memory_total_bytes = int(memory.used), int(memory.total)
    if rates := _ask(gpu.errors, "utilization", "nvmlDeviceGetUtilizationRates", handle):
        gpu.utilization = int(rates.gpu)
    if rows := _ask(gpu.errors, "remap_pending", "nvmlDeviceGetRemappedRows", handle):
        gpu.remapped_corrected, gpu.remapped_uncorrected = int(rows[0]), int(rows[1])
        gpu.remap_pending, gpu.remap_failed = bool(rows[2]), bool(rows[3])
    running = _ask(gpu.errors, "processes", "nvmlDeviceGetComputeRunningProcesses_v3", handle)
    gpu.processes = None if running is None else sorted(int(process.pid) for process in running)


def _read_fields(gpu: GpuReading, handle: Any) -> None:
    """Read the values that NVML identifies by a field number; each answer has an error code of its own."""
    answers = _ask(gpu.errors, "fields", "nvmlDeviceGetFieldValues", handle, [MEMORY_TEMPERATURE, RECOVERY_ACTION])
    values = {
        int(answer.fieldId): int(answer.value.uiVal)
        for answer in answers or ()
        if answer.nvmlReturn == pynvml.NVML_SUCCESS
    }
    gpu.memory_temperature_c = values.get(MEMORY_TEMPERATURE)
    gpu.recovery_action = values.get(RECOVERY_ACTION)


def _nvlinks(errors: dict[str, str], handle: Any) -> list[NvLinkReading]:
    """Read all NVLinks that the GPU has; NVML returns an error for other numbers."""
    found = []
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        state = _ask({}, "", "nvmlDeviceGetNvLinkState", handle, link)
        if state is None:
            continue
        nvlink = NvLinkReading(link, bool(state))
        for name, counter in NVLINK_COUNTERS.items():
            # A link that is down has no counters, so errors in reading them are not reported.
            into = errors if nvlink.up else {}
            setattr(
                nvlink,
                name,
                _ask(into, f"nvlink {link} {name}", "nvmlDeviceGetNvLinkErrorCounter", handle, link, counter),
            )
        found.append(nvlink)
    return found


def _fabric(errors: dict[str, str], handle: Any) -> FabricReading | None:
    """Read the state in the NVSwitch fabric, by the newest structure that package and driver both know.

    The name ``c_nvmlGpuFabricInfoV_t`` of the package means version 2, which is too small for an answer of version 3.
    """
    for name in ("c_nvmlGpuFabricInfo_v3_t", "c_nvmlGpuFabricInfo_v2_t"):
        if structure := getattr(pynvml, name, None):
            info = structure()
            if _ask(errors, "fabric", "nvmlDeviceGetGpuFabricInfoV", handle, ctypes.byref(info)) is not None:
                summary = int(getattr(info, "healthSummary", 0))
                return FabricReading(int(info.state), int(info.status), int(info.healthMask), summary)
    return None
