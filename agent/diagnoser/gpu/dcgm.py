"""This module runs NVIDIA's own diagnostics, DCGM's and EUD, if they are installed."""

from __future__ import annotations

import shutil
from typing import ClassVar

from pydantic import Field

from agent.diagnoser.diagnostic import UNABLE, DiagnosticLimits, DiagnosticTest
from agent.diagnoser.gpu.clocks import CLOCKS, COMMAND, GpuClocks, keep_clocks, read_clocks, set_back
from agent.diagnoser.gpu.report import NO_VERDICT_IDS, DcgmFailure, DcgmReport, Severity, parsed
from agent.diagnoser.kind import gpus
from agent.monitor import programs
from everstep.errors import CannotInspect
from everstep.model.diagnosis import Diagnostic, DiagnosticResult
from everstep.model.finding import Finding, Health, Reason, Remedy

BAD = Reason(
    "dcgm-isolate",
    "NVIDIA's diagnostic reports that a GPU has to be taken out of service",
    remedy=Remedy.REPLACE,
    sure=True,
    source="DCGM: error severity 2",
)
RESET = Reason(
    "dcgm-reset",
    "NVIDIA's diagnostic reports that a GPU has to be reset",
    remedy=Remedy.RESET_GPU,
    sure=True,
    source="DCGM: error severity 6",
)
REPORTED = Reason(
    "dcgm-reported",
    "NVIDIA's diagnostic reports an error that a GPU may not have caused",
    verdict=Health.UNKNOWN,
    source="DCGM: other severities; versions before 4 print none",
)
SETUP = Reason(
    "dcgm-setup",
    "NVIDIA's diagnostic reports that the machine is set up wrongly",
    remedy=Remedy.CHECK_SETUP,
    verdict=Health.UNKNOWN,
    source="DCGM: error severity 5",
)
SHARE = 0.9
"""Share of the test's time that the program may use; the rest is kept for restoring the clocks."""
_REASONS = {Severity.ISOLATE: BAD, Severity.RESET: RESET, Severity.CONFIG: SETUP}


class DcgmTestLimits(DiagnosticLimits):
    """Limits of DCGM's diagnostics."""

    deadline_s: float = Field(default=300.0, gt=0)
    """The test is killed after this time, seconds; level 2 takes about two minutes."""
    command: str = "dcgmi"
    """Name or path of the program."""
    run: str = "2"
    """Level of the diagnostic, or names of tests: level 1 takes seconds, level 3 a quarter of an hour."""
    lock_clocks: str = ""
    """``LOWEST,HIGHEST`` in MHz to which the site locks the clocks of GPUs; they are locked again after the test."""


class EudTestLimits(DcgmTestLimits):
    """Limits of EUD."""

    deadline_s: float = Field(default=1200.0, gt=0)
    """The test is killed after this time, seconds."""
    run: str = "eud"
    """Name of the test."""


class DcgmTest(DiagnosticTest):
    """Runs ``dcgmi diag``."""

    name: ClassVar[Diagnostic] = Diagnostic.DCGM
    does: ClassVar[str] = "DCGM's own diagnostics of the GPUs, if DCGM is installed; clocks are restored after them"
    reasons: ClassVar[tuple[Reason, ...]] = (BAD, RESET, REPORTED, SETUP, CLOCKS)
    limits_type: ClassVar[type[DiagnosticLimits]] = DcgmTestLimits

    def run(self) -> DiagnosticResult:
        """Test once."""
        if not gpus() and shutil.which(self.limits.command) is None:
            return self.nothing("no GPU")
        if before := _clocks():
            keep_clocks(self.bench.folder, before, self.limits.lock_clocks)
        findings: list[Finding] = []
        measures: dict[str, float] = {}
        try:
            command = [self.limits.command, "diag", "-r", self.limits.run, "-j"]
            ran = programs.run(command, self.limits.deadline_s * SHARE)
            report = parsed(ran.output, ran.code)
            findings = self._findings(report)
            if not (report.passed or findings):
                raise CannotInspect(f"all of its tests were skipped: {', '.join(report.skipped) or 'it has none'}")
            measures["passed_results"] = float(report.passed)
        except CannotInspect as error:
            findings.append(self._unable("", str(error)))
        return self.result(*findings, *set_back(self.bench.folder, self.name), measures=measures)

    def _unable(self, item: str, why: str) -> Finding:
        return self.finding(UNABLE, item, text=f"{UNABLE.means}: {why}")

    def _findings(self, report: DcgmReport) -> list[Finding]:
        """Make a finding for each reason and part. A part that could not be tested does not affect other findings."""
        failures: dict[tuple[str, str], list[DcgmFailure]] = {}
        for failure in report.failures:
            failures.setdefault((_reason(failure).code, failure.part), []).append(failure)
        return [self._of_part(part, several) for (_, part), several in failures.items()]

    def _of_part(self, part: str, failures: list[DcgmFailure]) -> Finding:
        # DCGM numbers GPUs in its own way.
        reason, item = _reason(failures[0]), f"{part} of DCGM" if part else ""
        if reason is UNABLE:
            return self._unable(item, f"{NO_VERDICT_IDS[failures[0].error]}: {failures[0].text}")
        lines = [
            f"{failure.test}: {failure.text} (error {failure.error}, severity {failure.severity})"
            for failure in failures
        ]
        return self.finding(reason, item, *lines, text=f"{reason.means}: {lines[0]}")


class EudTest(DcgmTest):
    """Runs EUD through DCGM; it needs root and NVIDIA's package of EUD."""

    name: ClassVar[Diagnostic] = Diagnostic.EUD
    does: ClassVar[str] = "NVIDIA's EUD through DCGM, as root, if it is installed; clocks are restored after it"
    limits_type: ClassVar[type[DiagnosticLimits]] = EudTestLimits


def _reason(failure: DcgmFailure) -> Reason:
    return UNABLE if failure.error in NO_VERDICT_IDS else _REASONS.get(failure.severity, REPORTED)


def _clocks() -> dict[str, GpuClocks]:
    """Return the settings of the GPUs; empty: they cannot be read."""
    if shutil.which(COMMAND) is None:
        return {}
    try:
        return read_clocks()
    except CannotInspect:
        return {}
