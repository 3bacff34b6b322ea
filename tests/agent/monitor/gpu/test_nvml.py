"""The real reader of NVML. It runs once without a driver, and otherwise with the answers of a fake library."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pynvml  # type: ignore[import-untyped]
import pytest

from agent.monitor.gpu import nvml
from agent.monitor.gpu.nvml import NvmlReader
from agent.monitor.gpu.reading import GpuTrouble

Answer = Callable[..., Any]


def raises(code: int) -> Answer:
    def call(*_: Any) -> Any:
        raise pynvml.NVMLError(code)

    return call


def gives(value: Any) -> Answer:
    return lambda *_: value


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A fake NVML with one GPU. It supports only what a test adds."""
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer", lambda name: raises(pynvml.NVML_ERROR_NOT_SUPPORTED))

    def answers(**functions: Answer) -> None:
        for name, call in functions.items():
            monkeypatch.setattr(pynvml, name, call)

    answers(
        nvmlInit=gives(None),
        nvmlDeviceGetCount=gives(1),
        nvmlDeviceGetHandleByIndex=gives("handle"),
        nvmlDeviceGetPciInfo=gives(SimpleNamespace(busId="00000000:1A:00.0")),
        nvmlDeviceGetUUID=gives("GPU-1"),
        nvmlDeviceGetName=gives("NVIDIA H100 80GB HBM3"),
    )
    return answers


def test_a_missing_library_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error comes from pynvml, which does not find the library."""

    def no_library(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(pynvml, "nvmlLib", None)
    monkeypatch.setattr(pynvml, "CDLL", no_library)
    reading = NvmlReader().read()
    assert reading.trouble is GpuTrouble.LIBRARY_MISSING
    assert reading.text == "NVML Shared Library Not Found (NVML error 12)"
    assert reading.gpus == []


@pytest.mark.parametrize(
    ("code", "trouble"),
    [
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, GpuTrouble.NO_DRIVER),
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, GpuTrouble.MISMATCH),
        (pynvml.NVML_ERROR_NO_PERMISSION, GpuTrouble.DENIED),
        (pynvml.NVML_ERROR_UNKNOWN, GpuTrouble.OTHER),
        (4711, GpuTrouble.OTHER),
    ],
)
def test_a_failed_initialization_is_reported_and_repeated(
    library: Callable[..., None], code: int, trouble: GpuTrouble
) -> None:
    reader = NvmlReader()
    library(nvmlInit=raises(code))
    assert reader.read().trouble is trouble
    library(nvmlInit=gives(None))
    assert len(reader.read().gpus) == 1


def test_an_unsupported_value_is_none_and_no_error(library: Callable[..., None]) -> None:
    (gpu,) = NvmlReader().read().gpus
    assert (gpu.bus_id, gpu.uuid, gpu.name, gpu.trouble) == ("0000:1a:00.0", "GPU-1", "NVIDIA H100 80GB HBM3", None)
    assert {getattr(gpu, name) for name in nvml.NUMBERS} == {None}
    assert (gpu.nvlinks, gpu.fabric, gpu.processes, gpu.recovery_action) == ([], None, None, None)
    assert gpu.errors == {}


def test_a_value_that_the_package_does_not_know_is_none_and_no_error(
    library: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """This happens, for example, if the package is older than the reader."""
    for name in ("nvmlDeviceGetCurrentClocksEventReasons", "c_nvmlGpuFabricInfo_v3_t", "c_nvmlGpuFabricInfo_v2_t"):
        monkeypatch.delattr(pynvml, name)
    (gpu,) = NvmlReader().read().gpus
    assert (gpu.clocks_event_reasons, gpu.fabric, gpu.errors) == (None, None, {})


def test_a_value_that_fails_does_not_affect_other_values(library: Callable[..., None]) -> None:
    library(
        nvmlDeviceGetTemperature=raises(pynvml.NVML_ERROR_UNKNOWN),
        nvmlDeviceGetComputeRunningProcesses_v3=raises(pynvml.NVML_ERROR_NO_PERMISSION),
        nvmlDeviceGetPowerUsage=gives(350_500),
        nvmlDeviceGetRemappedRows=gives((1, 2, 1, 0)),
        nvmlDeviceGetUtilizationRates=gives(SimpleNamespace(gpu=97, memory=40)),
        nvmlDeviceGetMemoryInfo=gives(SimpleNamespace(used=5, total=9, free=4)),
    )
    (gpu,) = NvmlReader().read().gpus
    assert gpu.errors == {"temperature_c": "Unknown Error (NVML error 999)"}, (
        "only the temperature is an error; a missing permission to list processes is none"
    )
    assert (gpu.temperature_c, gpu.power_w, gpu.utilization) == (None, 350.5, 97)
    assert (gpu.remapped_corrected, gpu.remapped_uncorrected) == (1, 2)
    assert (gpu.remap_pending, gpu.remap_failed) == (True, False)
    assert (gpu.memory_used_bytes, gpu.memory_total_bytes) == (5, 9)


@pytest.mark.parametrize("place", ["nvmlDeviceGetHandleByIndex", "nvmlDeviceGetPciInfo", "nvmlDeviceGetNvLinkState"])
@pytest.mark.parametrize(
    ("code", "trouble"),
    [
        (pynvml.NVML_ERROR_GPU_IS_LOST, GpuTrouble.LOST),
        (pynvml.NVML_ERROR_RESET_REQUIRED, GpuTrouble.RESET_REQUIRED),
    ],
)
def test_a_lost_gpu_is_noticed_in_every_call(
    library: Callable[..., None], place: str, code: int, trouble: GpuTrouble
) -> None:
    library(**{place: raises(code)})
    (gpu,) = NvmlReader().read().gpus
    assert gpu.trouble is trouble
    assert f"NVML error {code}" in gpu.text


def test_an_unreadable_gpu_does_not_affect_other_gpus(library: Callable[..., None]) -> None:
    def handle(index: int) -> str:
        if index == 1:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NO_PERMISSION)
        return "handle"

    library(nvmlDeviceGetCount=gives(3), nvmlDeviceGetHandleByIndex=handle)
    assert [gpu.trouble for gpu in NvmlReader().read().gpus] == [None, GpuTrouble.DENIED, None]


def test_fields_that_the_driver_does_not_support_are_none(library: Callable[..., None]) -> None:
    answers = [
        SimpleNamespace(fieldId=nvml.MEMORY_TEMPERATURE, nvmlReturn=0, value=SimpleNamespace(uiVal=61)),
        SimpleNamespace(fieldId=nvml.RECOVERY_ACTION, nvmlReturn=3, value=SimpleNamespace(uiVal=7)),
    ]
    library(nvmlDeviceGetFieldValues=gives(answers))
    (gpu,) = NvmlReader().read().gpus
    assert (gpu.memory_temperature_c, gpu.recovery_action) == (61, None)


def test_nvlinks_and_their_counters(library: Callable[..., None]) -> None:
    """The GPU has links 0 and 2; link 2 is down and has no counters."""

    def state(_: Any, link: int) -> int:
        if link not in (0, 2):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return int(link == 0)

    def counter(_: Any, link: int, which: int) -> int:
        if link == 2:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN)
        return 10 + which

    library(nvmlDeviceGetNvLinkState=state, nvmlDeviceGetNvLinkErrorCounter=counter)
    (gpu,) = NvmlReader().read().gpus
    assert [(one.link, one.up, one.replays, one.recoveries, one.crc_errors) for one in gpu.nvlinks] == [
        (0, True, 10, 11, 12),
        (2, False, None, None, None),
    ]
    assert gpu.errors == {}


def test_the_fabric_is_read_with_the_version_that_the_driver_supports(library: Callable[..., None]) -> None:
    def version_2_only(_: Any, reference: Any) -> int:
        info = reference._obj
        if info.version == pynvml.nvmlGpuFabricInfo_v3:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH)
        info.state, info.status, info.healthMask = 3, 0, 0x15
        return int(pynvml.NVML_SUCCESS)

    library(nvmlDeviceGetGpuFabricInfoV=version_2_only)
    (gpu,) = NvmlReader().read().gpus
    assert gpu.fabric is not None
    assert (gpu.fabric.state, gpu.fabric.health_mask, gpu.fabric.summary) == (3, 0x15, 0)
