"""This module has the rules for GPUs that cannot be used: they are lost, need a reset, are missing or have no driver.

These faults name a machine with high confidence (ByteRobust, figure 5, step 1: GPU unavailable).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from agent.monitor.gpu.reading import GpuReading, GpusReading, GpuTrouble
from agent.monitor.gpu.rules.rule import GpuKnown, GpuLimits, GpuProblem
from agent.needs import GPUS
from everstep.model.finding import Health, Owner, Reason, Remedy
from everstep.model.xid import RECOVERY_ACTIONS

UNAVAILABLE = "ByteRobust, figure 5, step 1: GPU unavailable"

LOST = Reason(
    "gpu-lost",
    "the GPU has fallen off the bus",
    remedy=Remedy.REBOOT,
    sure=True,
    source=f"{UNAVAILABLE}; NVML error 15",
)
RESET_REQUIRED = Reason(
    "gpu-reset-required",
    "the GPU has to be reset before it can be used",
    remedy=Remedy.RESET_GPU,
    sure=True,
    source=f"{UNAVAILABLE}; NVML error 16",
)
COUNT = Reason("gpu-count", "a GPU is missing", remedy=Remedy.REBOOT, sure=True, source=UNAVAILABLE)
RECOVERY_ACTION = Reason(
    "gpu-recovery-action",
    "the driver asks for a recovery of the GPU",
    remedy=Remedy.RESET_GPU,
    source="NVML field 230",
)
POWER = Reason(
    "gpu-power",
    "the GPU lacks power",
    remedy=Remedy.REPLACE,
    source="NVML error 8, and the power brake of NVML's clock event reasons",
)
UNREADABLE = Reason(
    "gpu-unreadable",
    "the driver does not report the state of the GPU",
    Owner.UNKNOWN,
    Remedy.WATCH,
    Health.UNKNOWN,
)
DENIED = Reason(
    "gpu-denied",
    "the agent may not read the GPU",
    Owner.UNKNOWN,
    Remedy.CHECK_SETUP,
    Health.UNKNOWN,
    source="NVML error 4",
)
MISMATCH = Reason(
    "gpu-driver-mismatch",
    "the GPU driver and its library have different releases: one was replaced without a reboot",
    remedy=Remedy.REBOOT,
    source="NVML error 18",
)
MISSING = Reason(
    "gpu-driver-missing",
    "the machine has GPUs, but no driver for them",
    remedy=Remedy.CHECK_SETUP,
    source="NVML errors 9 and 12",
)
HANGS = Reason(
    "gpu-driver-hangs",
    "the GPU driver does not answer",
    remedy=Remedy.REBOOT,
    source="ByteRobust, table 3: driver hang, 10 s",
)
REASONS = (
    LOST,
    RESET_REQUIRED,
    COUNT,
    RECOVERY_ACTION,
    POWER,
    UNREADABLE,
    DENIED,
    MISMATCH,
    MISSING,
    HANGS,
)

_OF_ONE = {
    GpuTrouble.LOST: LOST,
    GpuTrouble.RESET_REQUIRED: RESET_REQUIRED,
    GpuTrouble.NO_POWER: replace(POWER, sure=True),
    GpuTrouble.DENIED: DENIED,
}
_OF_ALL = {
    **_OF_ONE,
    GpuTrouble.MISMATCH: MISMATCH,
    GpuTrouble.NO_DRIVER: MISSING,
    GpuTrouble.LIBRARY_MISSING: MISSING,
}
NO_ACCESS = frozenset({GpuTrouble.LIBRARY_MISSING, GpuTrouble.DENIED})
"""Troubles that a container has if it was started without access to the GPUs."""
_ACTIONS = {
    each.number: replace(RECOVERY_ACTION, means=each.means, remedy=each.remedy, sure=each.kind.sure)
    for each in RECOVERY_ACTIONS
}
_OTHER_ACTION = replace(RECOVERY_ACTION, remedy=Remedy.WATCH, verdict=Health.UNKNOWN)


def of_all(reading: GpusReading, *, had_gpus: bool) -> Iterator[GpuProblem]:
    """Report why no GPU can be read.

    Args:
        reading: A reading with ``trouble``.
        had_gpus: Whether GPUs could be read at some time before.
    """
    assert reading.trouble
    reason = _OF_ALL.get(reading.trouble, UNREADABLE)
    if reading.trouble is GpuTrouble.LIBRARY_MISSING and not had_gpus:
        # Perhaps the GPUs are not meant to be used, or the agent's container may not use them.
        reason = replace(reason, owner=Owner.UNKNOWN, verdict=Health.UNKNOWN)
    text = f"{reason.means}; {GPUS.remedy()}" if reading.trouble in NO_ACCESS else reason.means
    yield GpuProblem(reason, text, reading.text)


def of_one(gpu: GpuReading) -> Iterator[GpuProblem]:
    """Report why a GPU with ``trouble`` cannot be read."""
    assert gpu.trouble
    reason = _OF_ONE.get(gpu.trouble, UNREADABLE)
    yield GpuProblem(reason, reason.means, gpu.text)


def recovery_action(gpu: GpuReading, known: GpuKnown, limits: GpuLimits, seconds: float) -> Iterator[GpuProblem]:
    """Report the recovery that the driver requests."""
    if gpu.recovery_action:
        reason = _ACTIONS.get(gpu.recovery_action, _OTHER_ACTION)
        asked = reason.means if reason is not _OTHER_ACTION else "do something that this release does not know"
        yield GpuProblem(reason, f"the driver asks to {asked}", f"recovery action {gpu.recovery_action}")


def unreadable(gpu: GpuReading, known: GpuKnown, limits: GpuLimits, seconds: float) -> Iterator[GpuProblem]:
    """Report values that are supported but could not be read at several consecutive inspections."""
    if known.in_a_row("unreadable", bool(gpu.errors)) >= limits.consecutive:
        evidence = "; ".join(f"{name}: {error}" for name, error in sorted(gpu.errors.items()))
        yield GpuProblem(UNREADABLE, f"the driver does not report {', '.join(sorted(gpu.errors))}", evidence)
