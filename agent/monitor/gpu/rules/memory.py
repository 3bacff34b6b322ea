"""This module has the rules for the memory of a GPU: uncorrected errors, and rows that had to be replaced."""

from __future__ import annotations

from collections.abc import Iterator

from agent.monitor.gpu.reading import GpuReading
from agent.monitor.gpu.rules.rule import GpuKnown, GpuLimits, GpuProblem
from everstep.model.finding import Health, Reason, Remedy

ECC = Reason(
    "gpu-ecc",
    "the GPU's memory had an uncorrected error",
    remedy=Remedy.RESET_GPU,
    # The counter does not show whether the error affected one process only; the Xid in the kernel log does.
    source="ByteRobust, table 1: GPU memory error",
)
REMAP_FAILED = Reason(
    "gpu-row-remap-failed",
    "a bad row of the GPU's memory could not be replaced",
    remedy=Remedy.REPLACE,
    sure=True,
    source="NVIDIA's policy for GPU memory: qualifies for a replacement; as Xid 64",
)
REMAP_PENDING = Reason(
    "gpu-row-remap-pending",
    "a bad row of the GPU's memory will be replaced at the next reset",
    remedy=Remedy.RESET_GPU,
    verdict=Health.UNKNOWN,
    source="NVIDIA's policy for GPU memory: reset when the job stops; as Xid 63",
)
REASONS = (ECC, REMAP_FAILED, REMAP_PENDING)


def ecc(gpu: GpuReading, known: GpuKnown, limits: GpuLimits, seconds: float) -> Iterator[GpuProblem]:
    """Report errors since the last inspection. Errors before the first inspection may be old, and are not reported."""
    if rose := known.rose("ecc", gpu.ecc_uncorrected):
        seen = f"{rose} more uncorrected errors, {gpu.ecc_uncorrected} since the last reset"
        yield GpuProblem(ECC, ECC.means, seen, lasts_s=limits.ecc_lasts_s)


def rows(gpu: GpuReading, known: GpuKnown, limits: GpuLimits, seconds: float) -> Iterator[GpuProblem]:
    """Report bad rows that wait for a reset or could not be replaced."""
    seen = (
        f"rows replaced: {gpu.remapped_corrected} for corrected errors, {gpu.remapped_uncorrected} for uncorrected ones"
    )
    if gpu.remap_failed:
        yield GpuProblem(REMAP_FAILED, REMAP_FAILED.means, seen)
    if gpu.remap_pending:
        yield GpuProblem(REMAP_PENDING, REMAP_PENDING.means, seen)
