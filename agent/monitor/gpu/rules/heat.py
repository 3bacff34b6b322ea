"""This module has the rules for heat and power: GPUs that are too hot, or that the hardware slows down."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from agent.monitor.gpu.reading import GpuReading
from agent.monitor.gpu.rules.available import POWER
from agent.monitor.gpu.rules.rule import GpuKnown, GpuLimits, GpuProblem
from everstep.model.finding import Health, Reason, Remedy

HOT = Reason("gpu-hot", "the GPU is too hot", remedy=Remedy.REPLACE, source="ByteRobust, table 3: high temperature")
MEMORY_HOT = Reason(
    "gpu-memory-hot",
    "the GPU's memory is too hot",
    remedy=Remedy.REPLACE,
    source="ByteRobust, table 3: high temperature",
)
THROTTLED = Reason(
    "gpu-throttled",
    "the hardware slows the GPU down",
    remedy=Remedy.REPLACE,
    source="NVML's clock event reasons",
)
REASONS = (HOT, MEMORY_HOT, THROTTLED)

HARDWARE_SLOWDOWN = 0x8
HARDWARE_THERMAL = 0x40
POWER_BRAKE = 0x80
"""Bits of NVML's clock event reasons."""


def hot(gpu: GpuReading, known: GpuKnown, limits: GpuLimits, seconds: float) -> Iterator[GpuProblem]:
    """Compare the temperature with the configured limit, or else with the limits of the device.

    At the slowdown temperature and above, the GPU is faulty. If it is above the maximum temperature, but below the
    slowdown temperature, it is only warm, and its verdict is unknown.
    """
    now = gpu.temperature_c
    if now is None:
        return
    if limits.temperature_c is not None:
        if now > limits.temperature_c:
            yield _at(HOT, now, limits.temperature_c, "the configured limit")
    elif gpu.slowdown_c and now >= gpu.slowdown_c:
        yield _at(HOT, now, gpu.slowdown_c, "its slowdown temperature")
    elif gpu.max_c and now > gpu.max_c:
        warm = replace(HOT, verdict=Health.UNKNOWN, remedy=Remedy.WATCH)
        yield _at(warm, now, gpu.max_c, "its maximum temperature")


def memory_hot(gpu: GpuReading, known: GpuKnown, limits: GpuLimits, seconds: float) -> Iterator[GpuProblem]:
    """Compare the temperature of the memory with the configured limit, or else with the limit of the device."""
    now, configured = gpu.memory_temperature_c, limits.memory_temperature_c
    limit = gpu.memory_max_c if configured is None else configured
    if now is not None and limit and now > limit:
        yield _at(MEMORY_HOT, now, limit, "its limit" if configured is None else "the configured limit")


def throttled(gpu: GpuReading, known: GpuKnown, limits: GpuLimits, seconds: float) -> Iterator[GpuProblem]:
    """Report a slowdown by the hardware over several inspections. Slowdowns by software are normal."""
    bits = gpu.clocks_event_reasons
    if bits is None:
        return
    brake = bool(bits & POWER_BRAKE)
    slow = bool(bits & (HARDWARE_SLOWDOWN | HARDWARE_THERMAL)) and not brake
    evidence = f"clock event reasons {bits:#x}, {gpu.sm_clock_mhz} MHz, {gpu.temperature_c} °C, {gpu.power_w} W"
    if known.in_a_row("brake", brake) >= limits.consecutive:
        yield GpuProblem(POWER, "the power supply slows the GPU down (power brake)", evidence)
    if known.in_a_row("slow", slow) >= limits.consecutive:
        why = "for heat" if bits & HARDWARE_THERMAL else "for heat or power (it does not report which)"
        yield GpuProblem(THROTTLED, f"the hardware slows the GPU down {why}", evidence)


def _at(reason: Reason, now: int, limit: int, which: str) -> GpuProblem:
    return GpuProblem(reason, f"{reason.means}: {now} °C", f"{now} °C, and {which} is {limit} °C")
