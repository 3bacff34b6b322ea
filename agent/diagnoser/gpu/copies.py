"""The GPU copy test copies data from main memory to each GPU and back, through PCIe and the memory of the GPU."""

from __future__ import annotations

import time
from statistics import median
from typing import Any, ClassVar

from pydantic import Field

from agent.diagnoser.diagnostic import DiagnosticLimits, DiagnosticTest
from agent.diagnoser.kind import gpus, hardware
from everstep.base.text import size_text
from everstep.decisions.blame.diagnose.compare import SLOW_SHARE, below
from everstep.errors import CannotInspect
from everstep.model.diagnosis import Diagnostic, DiagnosticResult
from everstep.model.finding import Finding, Health, Reason, Remedy

DAMAGED = Reason(
    "gpu-copy-damaged", "bytes that are copied to a GPU and back arrive changed", remedy=Remedy.REPLACE, sure=True
)
FAILED = Reason("gpu-copy-failed", "copies to a GPU fail", remedy=Remedy.RESET_GPU, verdict=Health.UNKNOWN)
SLOW = Reason(
    "gpu-copy-slow", "copies to a GPU are far slower than to the other GPUs of the machine", remedy=Remedy.REPLACE
)


class GpuCopyLimits(DiagnosticLimits):
    """Limits of copies to GPUs and back."""

    mb: float = Field(default=256.0, gt=0)
    """Size of one copy, megabytes."""
    rounds: int = Field(default=5, ge=1)
    """Number of copies; the fastest one counts."""
    slow_share: float = Field(default=SLOW_SHARE, gt=0, lt=1)
    """A GPU whose bandwidth is less than this share of the machine's median is slow."""


class GpuCopyTest(DiagnosticTest):
    """Copies bytes to each GPU and back, and compares them."""

    name: ClassVar[Diagnostic] = Diagnostic.GPU_COPY
    does: ClassVar[str] = (
        "copies bytes to each GPU and back; compares them, and compares the bandwidth with the machine's other GPUs"
    )
    reasons: ClassVar[tuple[Reason, ...]] = (DAMAGED, FAILED, SLOW)
    limits_type: ClassVar[type[DiagnosticLimits]] = GpuCopyLimits
    imports: ClassVar[tuple[str, ...]] = ("torch",)

    def run(self) -> DiagnosticResult:
        """Test once."""
        import torch

        if not gpus():
            return self.nothing("no GPU")
        if not torch.cuda.is_available():
            raise CannotInspect("the driver shows GPUs, but torch cannot use any")
        findings: list[Finding] = []
        speeds: dict[str, dict[str, float]] = {"to": {}, "from": {}}
        for index in range(torch.cuda.device_count()):
            try:
                self._copied(torch, index, speeds, findings)
            except RuntimeError as error:
                findings.append(self.finding(FAILED, f"GPU {index}", str(error).splitlines()[0]))
        for way, by_gpu in speeds.items():
            for gpu, share in below(by_gpu, self.limits.slow_share).items():
                usual = size_text(median(by_gpu.values()))
                text = f"copies {way} it: {size_text(by_gpu[gpu])}/s, {share:.0%} of the usual {usual}/s"
                findings.append(self.finding(SLOW, gpu, text))
        measures = {f"copy_{way}_bytes_per_second": min(by_gpu.values()) for way, by_gpu in speeds.items() if by_gpu}
        return self.result(*findings, kind=hardware(), measures=measures)

    def _copied(self, torch: Any, index: int, speeds: dict[str, dict[str, float]], findings: list[Finding]) -> None:
        numbers = max(1, int(self.limits.mb * 1e6 / 4))
        sent = torch.arange(numbers, dtype=torch.int32).pin_memory()
        there = torch.empty(numbers, dtype=torch.int32, device=f"cuda:{index}")
        gpu, size = f"GPU {index}", sent.numel() * sent.element_size()
        for _ in range(self.limits.rounds):
            received = torch.zeros(numbers, dtype=torch.int32).pin_memory()
            for way, target, source in (("to", there, sent), ("from", received, there)):
                began = time.monotonic()
                target.copy_(source)
                torch.cuda.synchronize(index)
                speed = size / (time.monotonic() - began)
                speeds[way][gpu] = max(speeds[way].get(gpu, 0.0), speed)
            if wrong := int((received != sent).sum()):
                findings.append(self.finding(DAMAGED, gpu, f"{wrong} of {numbers} numbers differ"))
                return
