"""What should be the same on all machines of a job."""

from __future__ import annotations

import platform
import re
from typing import ClassVar

from pydantic import Field

import everstep
from agent.monitor.inspection import Inspection, InspectionResult, Limits
from everstep.model.finding import Reason
from everstep.system.procfs import nvidia_driver

DRIVER = re.compile(r"Kernel Module(?: for \S+)?\s+(\d[\d.]+)")


class VersionsLimits(Limits):
    """How often versions are read."""

    interval_s: float = Field(default=60.0, gt=0)


class VersionsInspection(Inspection):
    """Versions of kernel, GPU driver and everstep. It has no findings: only a comparison shows which is odd."""

    name: ClassVar[str] = "versions"
    inspects: ClassVar[str] = "versions that should be the same everywhere"
    reasons: ClassVar[tuple[Reason, ...]] = ()
    limits_type: ClassVar[type[Limits]] = VersionsLimits

    def inspect(self) -> InspectionResult:
        """Read the versions."""
        facts = {"kernel": platform.release(), "python": platform.python_version(), "everstep": everstep.__version__}
        if found := DRIVER.search(nvidia_driver(self.site.proc)):
            facts["nvidia driver"] = found[1]
        return InspectionResult(facts=facts)
