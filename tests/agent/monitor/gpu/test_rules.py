"""The rules that judge readings of GPUs, with values as devices report them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from agent.monitor.gpu.inspection import RULES
from agent.monitor.gpu.reading import FabricReading, GpuReading, GpusReading, GpuTrouble, NvLinkReading
from agent.monitor.gpu.rules import available, heat, links, memory
from agent.monitor.gpu.rules.rule import GpuKnown, GpuLimits, GpuProblem, GpuRule
from everstep.model.finding import Health, Owner, Remedy

LIMITS = GpuLimits(consecutive=2)
INTERVAL_S = 10.0
WARM = {"slowdown_c": 87, "max_c": 83, "memory_max_c": 95}


def gpu(**values: Any) -> GpuReading:
    """Return the reading of a GPU that supports only these values."""
    return GpuReading(0, "0000:1a:00.0", "GPU-1", **values)


def problems(
    judge: GpuRule, *readings: GpuReading, limits: GpuLimits = LIMITS, seconds: float = INTERVAL_S
) -> list[GpuProblem]:
    """Return the problems at the last of several looks. The agent restarts between the looks."""
    kept: dict[str, Any] = {}
    said: list[GpuProblem] = []
    for number, reading in enumerate(readings):
        known = GpuKnown(kept)
        said = list(judge(reading, known, limits, seconds if number else 0.0))
        kept = known.kept()
    return said


def codes(seen: list[GpuProblem]) -> list[tuple[str, Health]]:
    return [(one.reason.code, one.reason.verdict) for one in seen]


@pytest.mark.parametrize("judge", RULES)
def test_a_gpu_without_any_supported_value_has_no_problem(judge: GpuRule) -> None:
    assert problems(judge, *[gpu()] * 5) == []


@pytest.mark.parametrize(
    ("action", "remedy", "sure", "verdict"),
    [
        (1, Remedy.RESET_GPU, True, Health.FAULTY),
        (2, Remedy.REBOOT, True, Health.FAULTY),
        (3, Remedy.RESET_GPU, False, Health.FAULTY),
        (4, Remedy.RESET_GPU, False, Health.FAULTY),
        (6, Remedy.REBOOT, True, Health.FAULTY),
        (99, Remedy.WATCH, False, Health.UNKNOWN),
    ],
)
def test_the_recovery_action(action: int, remedy: Remedy, sure: bool, verdict: Health) -> None:
    (seen,) = problems(available.recovery_action, gpu(recovery_action=action))
    assert (seen.reason.code, seen.reason.remedy) == ("gpu-recovery-action", remedy)
    assert (seen.reason.sure, seen.reason.verdict) == (sure, verdict)
    assert problems(available.recovery_action, gpu(recovery_action=0)) == []


@pytest.mark.parametrize(
    ("trouble", "had_gpus", "code", "verdict"),
    [
        (GpuTrouble.MISMATCH, False, "gpu-driver-mismatch", Health.FAULTY),
        (GpuTrouble.NO_DRIVER, False, "gpu-driver-missing", Health.FAULTY),
        (GpuTrouble.LIBRARY_MISSING, True, "gpu-driver-missing", Health.FAULTY),
        (GpuTrouble.LIBRARY_MISSING, False, "gpu-driver-missing", Health.UNKNOWN),
        (GpuTrouble.DENIED, True, "gpu-denied", Health.UNKNOWN),
        (GpuTrouble.OTHER, True, "gpu-unreadable", Health.UNKNOWN),
        (GpuTrouble.LOST, True, "gpu-lost", Health.FAULTY),
    ],
)
def test_a_driver_in_trouble(trouble: GpuTrouble, had_gpus: bool, code: str, verdict: Health) -> None:
    (seen,) = available.of_all(GpusReading(trouble, "what NVML said"), had_gpus=had_gpus)
    assert (seen.reason.code, seen.reason.verdict, seen.evidence) == (code, verdict, "what NVML said")


@pytest.mark.parametrize(
    ("trouble", "code", "verdict", "sure"),
    [
        (GpuTrouble.LOST, "gpu-lost", Health.FAULTY, True),
        (GpuTrouble.RESET_REQUIRED, "gpu-reset-required", Health.FAULTY, True),
        (GpuTrouble.NO_POWER, "gpu-power", Health.FAULTY, True),
        (GpuTrouble.DENIED, "gpu-denied", Health.UNKNOWN, False),
        (GpuTrouble.OTHER, "gpu-unreadable", Health.UNKNOWN, False),
    ],
)
def test_a_gpu_in_trouble(trouble: GpuTrouble, code: str, verdict: Health, sure: bool) -> None:
    (seen,) = available.of_one(GpuReading(0, trouble=trouble))
    assert (seen.reason.code, seen.reason.verdict, seen.reason.sure) == (code, verdict, sure)


def test_every_trouble_has_a_reason_that_the_inspection_declares() -> None:
    declared = {reason.code for reason in available.REASONS}
    for trouble in GpuTrouble:
        for seen in (
            *available.of_one(GpuReading(0, trouble=trouble)),
            *available.of_all(GpusReading(trouble), had_gpus=True),
        ):
            assert seen.reason.code in declared


def test_values_that_cannot_be_read_twice_in_a_row_are_unknown() -> None:
    sick = gpu(errors={"temperature_c": "Unknown Error (NVML error 999)"})
    assert problems(available.unreadable, sick) == []
    (seen,) = problems(available.unreadable, sick, sick)
    assert codes([seen]) == [("gpu-unreadable", Health.UNKNOWN)]
    assert "temperature_c" in seen.text
    assert problems(available.unreadable, sick, gpu(), sick) == []


@pytest.mark.parametrize(
    ("counts", "found"),
    [
        ((0, 0), False),
        ((0, 1), True),
        ((5,), False),  # the errors happened before the first look
        ((5, 5), False),
        ((5, 7), True),
        ((5, 0), False),  # the GPU was reset
        ((5, 0, 1), True),
        ((2**64 - 1, 0), False),  # the counter wrapped around
        ((3, None, 3), False),
        ((3, None, 4), True),
    ],
)
def test_uncorrected_memory_errors_count_from_the_first_look(counts: tuple[int | None, ...], found: bool) -> None:
    seen = problems(memory.ecc, *[gpu(ecc_uncorrected=count) for count in counts])
    assert codes(seen) == [("gpu-ecc", Health.FAULTY)] * found
    assert all(one.lasts_s == LIMITS.ecc_lasts_s and not one.reason.sure for one in seen)


def test_corrected_memory_errors_are_no_fault() -> None:
    assert problems(memory.ecc, gpu(ecc_corrected=0), gpu(ecc_corrected=1000)) == []


def test_rows_of_memory() -> None:
    """A row that will be remapped at the next reset is no fault. A row that cannot be remapped is a fault."""
    assert codes(problems(memory.rows, gpu(remap_pending=True, remap_failed=False))) == [
        ("gpu-row-remap-pending", Health.UNKNOWN)
    ]
    (failed,) = problems(memory.rows, gpu(remap_pending=False, remap_failed=True))
    assert (failed.reason.code, failed.reason.sure) == ("gpu-row-remap-failed", True)
    assert problems(memory.rows, gpu(remapped_uncorrected=3, remap_pending=False, remap_failed=False)) == []


@pytest.mark.parametrize(
    ("temperature", "limits", "verdict"),
    [
        (83, {}, None),
        (84, {}, Health.UNKNOWN),
        (86, {}, Health.UNKNOWN),
        (87, {}, Health.FAULTY),
        (84, {"temperature_c": 83}, Health.FAULTY),
        (90, {"temperature_c": 95}, None),
    ],
)
def test_heat(temperature: int, limits: dict[str, int], verdict: Health | None) -> None:
    seen = problems(heat.hot, gpu(temperature_c=temperature, **WARM), limits=GpuLimits(**limits))
    assert [one.reason.verdict for one in seen] == ([verdict] if verdict else [])


def test_a_gpu_without_limits_of_its_own_is_not_judged() -> None:
    assert problems(heat.hot, gpu(temperature_c=200)) == []
    assert problems(heat.memory_hot, gpu(memory_temperature_c=200)) == []


@pytest.mark.parametrize(("temperature", "limit", "found"), [(95, None, 0), (96, None, 1), (91, 90, 1), (99, 100, 0)])
def test_heat_of_memory(temperature: int, limit: int | None, found: int) -> None:
    limits = GpuLimits(memory_temperature_c=limit)
    seen = problems(heat.memory_hot, gpu(memory_temperature_c=temperature, **WARM), limits=limits)
    assert codes(seen) == [("gpu-memory-hot", Health.FAULTY)] * found


@pytest.mark.parametrize(
    ("bits", "code"),
    [
        (0x1, None),  # idle
        (0x4 | 0x20, None),  # at the power limit, and slowed down by the driver
        (0x8, "gpu-throttled"),
        (0x8 | 0x40, "gpu-throttled"),
        (0x8 | 0x80, "gpu-power"),
    ],
)
def test_slowed_down_by_the_hardware(bits: int, code: str | None) -> None:
    slow = gpu(clocks_event_reasons=bits)
    assert [one.reason.code for one in problems(heat.throttled, slow, slow)] == ([code] if code else [])
    assert problems(heat.throttled, slow) == [], "a single slow look may be a short peak"
    assert problems(heat.throttled, slow, gpu(clocks_event_reasons=0), slow) == []


def test_pcie_lanes() -> None:
    narrow = gpu(pcie_width=8, pcie_width_max=16, utilization=90)
    idle = replace(narrow, utilization=0)
    whole = replace(narrow, pcie_width=16)
    assert codes(problems(links.pcie_width, narrow, narrow)) == [("gpu-pcie-width", Health.FAULTY)]
    assert problems(links.pcie_width, narrow) == []
    assert problems(links.pcie_width, idle, idle, idle) == [], "an idle GPU may use fewer lanes"
    assert len(problems(links.pcie_width, narrow, narrow, idle)) == 1, (
        "the problem is not over because the GPU is idle at one look"
    )
    assert problems(links.pcie_width, narrow, whole, narrow) == []


@pytest.mark.parametrize(
    ("replays", "seconds", "found"),
    [
        ((0, 1), 10, 0),
        ((0, 2), 10, 1),
        ((0, 8), 60, 0),
        ((0, 9), 60, 1),
        ((9, 0), 10, 0),
        ((99,), 10, 0),
        ((0, 1), 0.1, 0),
    ],
)
def test_pcie_replays(replays: tuple[int, ...], seconds: float, found: int) -> None:
    """More than 8 replays a minute are a problem. One replay between two quick looks is none."""
    seen = problems(links.pcie_replays, *[gpu(pcie_replays=count) for count in replays], seconds=seconds)
    assert codes(seen) == [("gpu-pcie-replays", Health.UNKNOWN)] * found


def with_links(*up: bool, state: int = 3, **counters: int) -> GpuReading:
    nvlinks = [NvLinkReading(link, so, **counters) for link, so in enumerate(up)]
    return gpu(nvlinks=nvlinks, fabric=FabricReading(state=state))


def test_an_nvlink_that_was_up_and_is_down_is_a_fault() -> None:
    whole, down = with_links(True, True, False), with_links(True, False, False)
    (seen,) = problems(links.nvlink_down, whole, down, down)
    assert (seen.reason.code, seen.evidence) == ("gpu-nvlink-down", "1 of 2 links that were up are down: 1")
    assert problems(links.nvlink_down, whole, down) == []
    assert problems(links.nvlink_down, down, down, down) == [], "a link that was never up may not be connected"
    assert problems(links.nvlink_down, whole, gpu(), gpu(), gpu()) == [], (
        "links that cannot be read do not count as down"
    )


def test_nvlinks_that_come_up_after_a_start_are_not_down() -> None:
    whole, coming = with_links(True, True), with_links(False, False, state=2)
    assert problems(links.nvlink_down, whole, coming, coming, coming) == []


@pytest.mark.parametrize(
    ("counter", "before", "now", "found"),
    [
        ("crc_errors", 0, 999, 0),
        ("crc_errors", 0, 1000, 1),
        ("replays", 0, 1000, 1),
        ("recoveries", 0, 1, 1),
        ("recoveries", 1, 1, 0),
        ("recoveries", 5, 0, 0),
        ("crc_errors", 10**6, 0, 0),
    ],
)
def test_errors_of_nvlinks(counter: str, before: int, now: int, found: int) -> None:
    """The limit is 100 errors a second over 10 s. A single recovery is already over the limit."""
    seen = problems(links.nvlink_errors, with_links(True, **{counter: before}), with_links(True, **{counter: now}))
    assert codes(seen) == [("gpu-nvlink-errors", Health.FAULTY)] * found


def on_fabric(state: int = 3, status: int = 0, mask: int = 0, summary: int = 0, up: bool = True) -> GpuReading:
    return gpu(nvlinks=[NvLinkReading(0, up)], fabric=FabricReading(state, status, mask, summary))


@pytest.mark.parametrize(
    ("reading", "verdict"),
    [
        (on_fabric(), None),
        (on_fabric(mask=0b10_10_10_10, summary=1), None),  # every health bit says: no problem
        (on_fabric(mask=0x1), Health.UNKNOWN),
        (on_fabric(mask=0x1 << 4), Health.FAULTY),
        (on_fabric(mask=0x1 | 0x1 << 4), Health.FAULTY),
        (on_fabric(mask=0x1 << 8), None),
        (on_fabric(mask=0x5 << 8), Health.FAULTY),
        (on_fabric(status=999), Health.FAULTY),
        (on_fabric(summary=2), Health.FAULTY),
        (on_fabric(summary=3), Health.UNKNOWN),
        (on_fabric(state=0, summary=2), None),
    ],
)
def test_the_fabric(reading: GpuReading, verdict: Health | None) -> None:
    seen = problems(links.fabric, reading)
    assert codes(seen) == ([("gpu-fabric", verdict)] if verdict else [])


def test_a_gpu_that_is_not_registered_with_the_fabric_is_faulty_after_two_looks() -> None:
    waiting = on_fabric(state=2)
    assert problems(links.fabric, on_fabric(), waiting) == []
    assert codes(problems(links.fabric, on_fabric(), waiting, waiting)) == [("gpu-fabric", Health.FAULTY)]
    alone = on_fabric(state=2, up=False)
    assert problems(links.fabric, alone, alone, alone) == [], "a GPU without NVLinks needs no fabric"


def test_reasons_name_their_source_and_an_owner() -> None:
    for reason in (*available.REASONS, *memory.REASONS, *heat.REASONS, *links.REASONS):
        assert reason.code.startswith("gpu-")
        assert reason.verdict is not Health.UNKNOWN or not reason.sure
        assert reason.owner in (Owner.MACHINE, Owner.UNKNOWN)
