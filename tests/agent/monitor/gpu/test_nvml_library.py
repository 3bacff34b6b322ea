"""The real reader calls the real package, which calls a fake library.

Every call uses the library's own names, arguments and structures. A call with a wrong name would look like a call that
the driver does not support.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pynvml  # type: ignore[import-untyped]
import pytest

from agent.monitor.gpu.nvml import NvmlReader
from agent.monitor.gpu.reading import FabricReading, GpuReading, NvLinkReading

OK, NOT_SUPPORTED, NO_ROOM, WRONG_VERSION = 0, 3, 7, 25
LINKS = 2


def number(value: int) -> Callable[..., int]:
    """Return a function of the library that gives one number through its last argument."""

    def call(*arguments: Any) -> int:
        arguments[-1]._obj.value = value
        return OK

    return call


class Library:
    """The functions that ``libnvidia-ml.so.1`` exports, for one GPU. The package finds that all others are missing."""

    fabric_version = pynvml.nvmlGpuFabricInfo_v3

    nvmlInitWithFlags = staticmethod(lambda flags: OK)  # noqa: N815 - the library's names
    nvmlDeviceGetCount_v2 = staticmethod(number(1))  # noqa: N815
    nvmlDeviceGetPowerUsage = staticmethod(number(71_500))  # noqa: N815
    nvmlDeviceGetEnforcedPowerLimit = staticmethod(number(700_000))  # noqa: N815
    nvmlDeviceGetCurrentClocksEventReasons = staticmethod(number(0x48))  # noqa: N815
    nvmlDeviceGetCurrPcieLinkGeneration = staticmethod(number(4))  # noqa: N815
    nvmlDeviceGetMaxPcieLinkGeneration = staticmethod(number(5))  # noqa: N815
    nvmlDeviceGetCurrPcieLinkWidth = staticmethod(number(8))  # noqa: N815
    nvmlDeviceGetMaxPcieLinkWidth = staticmethod(number(16))  # noqa: N815
    nvmlDeviceGetPcieReplayCounter = staticmethod(number(3))  # noqa: N815

    def nvmlSystemGetDriverVersion(self, text: Any, size: Any) -> int:  # noqa: N802
        text.value = b"570.86.15"
        return OK

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, handle: Any) -> int:  # noqa: N802
        return OK

    def nvmlDeviceGetPciInfo_v3(self, handle: Any, info: Any) -> int:  # noqa: N802
        info._obj.busId = b"00000000:1A:00.0"
        return OK

    def nvmlDeviceGetUUID(self, handle: Any, text: Any, size: Any) -> int:  # noqa: N802
        text.value = b"GPU-1"
        return OK

    def nvmlDeviceGetName(self, handle: Any, text: Any, size: Any) -> int:  # noqa: N802
        text.value = b"NVIDIA H100 80GB HBM3"
        return OK

    def nvmlDeviceGetTemperature(self, handle: Any, sensor: Any, value: Any) -> int:  # noqa: N802
        value._obj.value = 40 + sensor.value
        return OK

    def nvmlDeviceGetTemperatureThreshold(self, handle: Any, threshold: Any, value: Any) -> int:  # noqa: N802
        value._obj.value = {0: 92, 1: 87, 2: 95, 3: 83}[threshold.value]
        return OK

    def nvmlDeviceGetClockInfo(self, handle: Any, clock: Any, value: Any) -> int:  # noqa: N802
        value._obj.value = {0: 1000, 1: 1980}[clock.value]
        return OK

    def nvmlDeviceGetTotalEccErrors(self, handle: Any, error: Any, counter: Any, value: Any) -> int:  # noqa: N802
        value._obj.value = {(1, 0): 7, (0, 0): 70}[error.value, counter.value]
        return OK

    def nvmlDeviceGetMemoryInfo(self, handle: Any, info: Any) -> int:  # noqa: N802
        info._obj.total, info._obj.used = 80, 9
        return OK

    def nvmlDeviceGetUtilizationRates(self, handle: Any, rates: Any) -> int:  # noqa: N802
        rates._obj.gpu, rates._obj.memory = 97, 50
        return OK

    def nvmlDeviceGetRemappedRows(self, handle: Any, *values: Any) -> int:  # noqa: N802
        for value, now in zip(values, (1, 2, 1, 0), strict=True):
            value._obj.value = now
        return OK

    def nvmlDeviceGetComputeRunningProcesses_v3(self, handle: Any, count: Any, processes: Any) -> int:  # noqa: N802
        count._obj.value = 2
        if processes is None:
            return NO_ROOM
        processes[0].pid, processes[1].pid = 42, 7
        return OK

    def nvmlDeviceGetFieldValues(self, handle: Any, count: Any, values: Any) -> int:  # noqa: N802
        for one in values._obj:
            one.nvmlReturn, one.value.uiVal = {82: (OK, 61), 230: (OK, 4)}.get(one.fieldId, (NOT_SUPPORTED, 0))
        return OK

    def nvmlDeviceGetNvLinkState(self, handle: Any, link: int, state: Any) -> int:  # noqa: N802
        state._obj.value = 1
        return OK if link < LINKS else NOT_SUPPORTED

    def nvmlDeviceGetNvLinkErrorCounter(self, handle: Any, link: int, counter: Any, value: Any) -> int:  # noqa: N802
        value._obj.value = 10 * link + int(getattr(counter, "value", counter))
        return OK

    def nvmlDeviceGetGpuFabricInfoV(self, handle: Any, reference: Any) -> int:  # noqa: N802
        info = reference._obj
        if info.version > self.fabric_version:
            return WRONG_VERSION
        info.state, info.status, info.healthMask = 3, 0, 0x15
        if info.version == pynvml.nvmlGpuFabricInfo_v3:
            info.healthSummary = 1
        return OK


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    made = Library()
    monkeypatch.setattr(pynvml, "nvmlLib", made)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    return made


WHOLE = GpuReading(
    index=0,
    bus_id="0000:1a:00.0",
    uuid="GPU-1",
    name="NVIDIA H100 80GB HBM3",
    temperature_c=40,
    memory_temperature_c=61,
    shutdown_c=92,
    slowdown_c=87,
    max_c=83,
    memory_max_c=95,
    power_w=71.5,
    power_limit_w=700.0,
    sm_clock_mhz=1980,
    utilization=97,
    memory_used_bytes=9,
    memory_total_bytes=80,
    clocks_event_reasons=0x48,
    ecc_uncorrected=7,
    ecc_corrected=70,
    remapped_corrected=1,
    remapped_uncorrected=2,
    remap_pending=True,
    remap_failed=False,
    recovery_action=4,
    pcie_generation=4,
    pcie_generation_max=5,
    pcie_width=8,
    pcie_width_max=16,
    pcie_replays=3,
    nvlinks=[NvLinkReading(0, True, 0, 1, 2), NvLinkReading(1, True, 10, 11, 12)],
    fabric=FabricReading(3, 0, 0x15, 1),
    processes=[7, 42],
)


def test_everything_is_read_by_its_name(library: Library) -> None:
    reading = NvmlReader().read()
    assert (reading.trouble, reading.driver) == (None, "570.86.15")
    assert reading.gpus == [WHOLE]


def test_a_driver_of_an_older_fabric_structure(library: Library) -> None:
    library.fabric_version = pynvml.nvmlGpuFabricInfo_v2
    (gpu,) = NvmlReader().read().gpus
    assert gpu.fabric == FabricReading(3, 0, 0x15, 0)
    assert gpu.errors == {}
