"""This module has the rules for the connections of a GPU: PCIe, NVLink, and the NVSwitch fabric."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from agent.monitor.gpu.reading import FabricReading, GpuReading
from agent.monitor.gpu.rules.rule import GpuKnown, GpuLimits, GpuProblem
from everstep.model.finding import Health, Reason, Remedy

PCIE_WIDTH = Reason(
    "gpu-pcie-width",
    "the GPU uses fewer PCIe lanes than it could",
    remedy=Remedy.REPLACE,
    source="NVML",
)
PCIE_REPLAYS = Reason(
    "gpu-pcie-replays",
    "PCIe repeats many transmissions to the GPU",
    remedy=Remedy.WATCH,
    verdict=Health.UNKNOWN,
    source="DCGM warns beyond 8 in a minute",
)
NVLINK_DOWN = Reason(
    "gpu-nvlink-down",
    "an NVLink of the GPU has gone down",
    remedy=Remedy.RESET_GPU,
    source="NVRx fails on any link that is down",
)
NVLINK_ERRORS = Reason(
    "gpu-nvlink-errors",
    "an NVLink of the GPU has many errors",
    remedy=Remedy.RESET_GPU,
    source="DCGM fails from 100 checksum errors a second, and from one recovery on",
)
FABRIC = Reason(
    "gpu-fabric",
    "the connection of the GPU to the NVSwitch fabric is faulty",
    remedy=Remedy.RESET_GPU,
    source="NVML's fabric information",
)
REASONS = (PCIE_WIDTH, PCIE_REPLAYS, NVLINK_DOWN, NVLINK_ERRORS, FABRIC)

MINUTE_S = 60.0
COMPLETED = 3
_TRUE = 1
_FABRIC_BITS = {
    0: ("degraded bandwidth", Health.UNKNOWN),
    2: ("a route is being recovered", Health.UNKNOWN),
    4: ("a route is unhealthy", Health.FAULTY),
    6: ("access timed out and is being recovered", Health.UNKNOWN),
}
"""Shift within the health mask → meaning and verdict of the value 1 in the two bits there."""
_CONFIGURATION_SHIFT, _CONFIGURATION_MASK, _CONFIGURATION_NONE = 8, 0xF, 1
_SUMMARIES = {2: ("unhealthy", Health.FAULTY), 3: ("limited capacity", Health.UNKNOWN)}


def pcie_width(gpu: GpuReading, known: GpuKnown, limits: GpuLimits, seconds: float) -> Iterator[GpuProblem]:
    """Report missing lanes over several inspections of a busy GPU; the lanes of an idle GPU may be switched off."""
    width, most = gpu.pcie_width, gpu.pcie_width_max
    idle = gpu.utilization == 0
    if not width or not most:
        return
    narrow = None if idle and width < most else width < most
    if known.in_a_row("narrow", narrow) >= limits.consecutive:
        yield GpuProblem(PCIE_WIDTH, f"the GPU uses {width} of {most} PCIe lanes", f"x{width} of x{most}")


def pcie_replays(gpu: GpuReading, known: GpuKnown, limits: GpuLimits, seconds: float) -> Iterator[GpuProblem]:
    """Compare the rate of repeated transmissions since the last inspection with its limit."""
    rose = known.rose("pcie replays", gpu.pcie_replays)
    if rose and seconds > 0 and (rate := rose * MINUTE_S / max(seconds, limits.interval_s)) > limits.replays_per_minute:
        seen = f"{rose} repeated transmissions in {seconds:.0f} s"
        yield GpuProblem(
            PCIE_REPLAYS, f"PCIe repeats {rate:.0f} transmissions a minute", seen, limits.link_errors_last_s
        )


def nvlink_down(gpu: GpuReading, known: GpuKnown, limits: GpuLimits, seconds: float) -> Iterator[GpuProblem]:
    """Report links that were up and are down now, at several inspections; not while links come up after a boot."""
    were_up = known.links_up(_up(gpu))
    down = sorted(nvlink.link for nvlink in gpu.nvlinks if not nvlink.up and nvlink.link in were_up)
    coming_up = gpu.fabric is not None and 0 < gpu.fabric.state < COMPLETED
    if known.in_a_row("links down", None if coming_up else bool(down)) >= limits.consecutive:
        seen = f"{len(down)} of {len(were_up)} links that were up are down: {', '.join(map(str, down))}"
        yield GpuProblem(NVLINK_DOWN, f"{len(down)} of {len(were_up)} NVLinks are down", seen)


def nvlink_errors(gpu: GpuReading, known: GpuKnown, limits: GpuLimits, seconds: float) -> Iterator[GpuProblem]:
    """Compare the rates of errors since the last inspection with their limit; a single recovery is reported too."""
    bad = []
    for nvlink in gpu.nvlinks:
        if known.rose(f"link {nvlink.link} recoveries", nvlink.recoveries):
            bad.append(f"link {nvlink.link} was trained anew")
        for what, value in (("checksum errors", nvlink.crc_errors), ("repeated transmissions", nvlink.replays)):
            rose = known.rose(f"link {nvlink.link} {what}", value)
            if rose and seconds > 0 and rose / max(seconds, limits.interval_s) >= limits.nvlink_errors_per_s:
                bad.append(f"link {nvlink.link}: {rose} {what} in {seconds:.0f} s")
    if bad:
        yield GpuProblem(NVLINK_ERRORS, f"NVLink: {bad[0]}", "; ".join(bad), limits.link_errors_last_s)


def fabric(gpu: GpuReading, known: GpuKnown, limits: GpuLimits, seconds: float) -> Iterator[GpuProblem]:
    """Report a GPU that is not registered with the fabric, or not healthy there. A GPU without links is ignored."""
    info = gpu.fabric
    if info is None or info.state == 0 or not known.links_up(_up(gpu)):
        known.in_a_row("no fabric", False)
        return
    seen = f"state {info.state}, status {info.status}, health mask {info.health_mask:#x}, summary {info.summary}"
    if known.in_a_row("no fabric", info.state != COMPLETED) >= limits.consecutive:
        yield GpuProblem(FABRIC, "the GPU is not registered with the NVSwitch fabric", seen)
    elif info.state == COMPLETED and (problems := _fabric_problems(info)):
        verdict = max((verdict for _, verdict in problems), key=[Health.UNKNOWN, Health.FAULTY].index)
        remedy = FABRIC.remedy if verdict is Health.FAULTY else Remedy.WATCH
        text = f"the NVSwitch fabric: {', '.join(text for text, _ in problems)}"
        yield GpuProblem(replace(FABRIC, verdict=verdict, remedy=remedy), text, seen)


def _up(gpu: GpuReading) -> list[int]:
    return [nvlink.link for nvlink in gpu.nvlinks if nvlink.up]


def _fabric_problems(info: FabricReading) -> list[tuple[str, Health]]:
    problems = [problem for shift, problem in _FABRIC_BITS.items() if (info.health_mask >> shift) & 0x3 == _TRUE]
    if info.status:
        problems.append((f"the registration failed with error {info.status}", Health.FAULTY))
    if (wrong := (info.health_mask >> _CONFIGURATION_SHIFT) & _CONFIGURATION_MASK) > _CONFIGURATION_NONE:
        problems.append((f"wrong configuration ({wrong})", Health.FAULTY))
    if not problems and info.summary in _SUMMARIES:
        problems.append(_SUMMARIES[info.summary])
    return problems
