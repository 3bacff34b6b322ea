"""This module inspects versions that should be equal on all machines of a job."""

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
    """The period of the inspection."""

    interval_s: float = Field(default=60.0, gt=0)


class VersionsInspection(Inspection):
    """Reads the versions of kernel, Python, GPU driver and everstep; only a comparison of machines can show faults."""

    name: ClassVar[str] = "versions"
    inspects: ClassVar[str] = "versions that should be equal on all machines"
    reasons: ClassVar[tuple[Reason, ...]] = ()
    limits_type: ClassVar[type[Limits]] = VersionsLimits

    def inspect(self) -> InspectionResult:
        """Read all versions."""
        facts = {"kernel": platform.release(), "python": platform.python_version(), "everstep": everstep.__version__}
        if match := DRIVER.search(nvidia_driver(self.site.proc)):
            facts["nvidia driver"] = match[1]
        return InspectionResult(facts=facts)
