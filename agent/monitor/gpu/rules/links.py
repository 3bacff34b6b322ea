"""What connects a GPU: PCIe, NVLink, the NVSwitch fabric."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from agent.monitor.gpu.reading import FabricReading, GpuReading
from agent.monitor.gpu.rules.rule import GpuKnown, GpuLimits, GpuProblem
from everstep.model.finding import Health, Reason, Remedy

PCIE_WIDTH = Reason(
    "gpu-pcie-width",
    "the GPU has fewer PCIe lanes than it could have",
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
    "an NVLink of the GPU that was up is down",
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
    "the GPU has no sound connection to the NVSwitch fabric",
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
"""Shift within the health mask → what it means where the two bits there are 1."""
_CONFIGURATION_SHIFT, _CONFIGURATION_MASK, _CONFIGURATION_NONE = 8, 0xF, 1
_SUMMARIES = {2: ("unhealthy", Health.FAULTY), 3: ("limited capacity", Health.UNKNOWN)}


def pcie_width(gpu: GpuReading, known: GpuKnown, limits: GpuLimits, seconds: float) -> Iterator[GpuProblem]:
    """Fewer lanes than device and machine can, for several looks with work on the GPU: without, lanes may sleep."""
    width, most = gpu.pcie_width, gpu.pcie_width_max
    idle = gpu.utilization == 0
    if not width or not most:
        return
    narrow = None if idle and width < most else width < most
    if known.in_a_row("narrow", narrow) >= limits.consecutive:
        yield GpuProblem(PCIE_WIDTH, f"the GPU has {width} PCIe lanes and could have {most}", f"x{width} of x{most}")


def pcie_replays(gpu: GpuReading, known: GpuKnown, limits: GpuLimits, seconds: float) -> Iterator[GpuProblem]:
    """The rate since the last look."""
    rose = known.rose("pcie replays", gpu.pcie_replays)
    if rose and seconds > 0 and (rate := rose * MINUTE_S / max(seconds, limits.interval_s)) > limits.replays_per_minute:
        seen = f"{rose} repeated transmissions in {seconds:.0f} s"
        yield GpuProblem(
            PCIE_REPLAYS, f"PCIe repeats {rate:.0f} transmissions a minute", seen, limits.link_errors_last_s
        )


def nvlink_down(gpu: GpuReading, known: GpuKnown, limits: GpuLimits, seconds: float) -> Iterator[GpuProblem]:
    """Links that were up at some time and are down for several looks, but not while they come up after a start."""
    were_up = known.links_up(_up(gpu))
    down = sorted(nvlink.link for nvlink in gpu.nvlinks if not nvlink.up and nvlink.link in were_up)
    coming_up = gpu.fabric is not None and 0 < gpu.fabric.state < COMPLETED
    if known.in_a_row("links down", None if coming_up else bool(down)) >= limits.consecutive:
        seen = f"{len(down)} of {len(were_up)} links that were up are down: {', '.join(map(str, down))}"
        yield GpuProblem(NVLINK_DOWN, f"{len(down)} of {len(were_up)} NVLinks are down", seen)


def nvlink_errors(gpu: GpuReading, known: GpuKnown, limits: GpuLimits, seconds: float) -> Iterator[GpuProblem]:
    """Rates since the last look, of the worst link; a recovery counts by itself."""
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
    """Registered with the fabric, and healthy there. A GPU without links has nothing to register for."""
    info = gpu.fabric
    if info is None or info.state == 0 or not known.links_up(_up(gpu)):
        known.in_a_row("no fabric", False)
        return
    seen = f"state {info.state}, status {info.status}, health mask {info.health_mask:#x}, summary {info.summary}"
    if known.in_a_row("no fabric", info.state != COMPLETED) >= limits.consecutive:
        yield GpuProblem(FABRIC, "the GPU is not registered with the NVSwitch fabric", seen)
    elif info.state == COMPLETED and (said := _fabric_says(info)):
        verdict = max((verdict for _, verdict in said), key=[Health.UNKNOWN, Health.FAULTY].index)
        remedy = FABRIC.remedy if verdict is Health.FAULTY else Remedy.WATCH
        text = f"the NVSwitch fabric: {', '.join(what for what, _ in said)}"
        yield GpuProblem(replace(FABRIC, verdict=verdict, remedy=remedy), text, seen)


def _up(gpu: GpuReading) -> list[int]:
    return [nvlink.link for nvlink in gpu.nvlinks if nvlink.up]


def _fabric_says(info: FabricReading) -> list[tuple[str, Health]]:
    said = [what for shift, what in _FABRIC_BITS.items() if (info.health_mask >> shift) & 0x3 == _TRUE]
    if info.status:
        said.append((f"the registration failed with error {info.status}", Health.FAULTY))
    if (wrong := (info.health_mask >> _CONFIGURATION_SHIFT) & _CONFIGURATION_MASK) > _CONFIGURATION_NONE:
        said.append((f"wrong configuration ({wrong})", Health.FAULTY))
    if not said and info.summary in _SUMMARIES:
        said.append(_SUMMARIES[info.summary])
    return said
