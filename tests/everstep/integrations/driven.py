"""A rank as everstep starts it. It is started several times in this process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from everstep.rank.step_reports import ReportFile, StepRecord


class Crash(Exception):
    """Stands for the end of the process."""


@dataclass
class Job:
    """One rank of a job."""

    begin: Callable[..., ReportFile]
    patch: pytest.MonkeyPatch
    reports: ReportFile | None = None

    def start(self, generation: int, *, resume: int = 0) -> None:
        """Set the environment for a generation."""
        self.reports = self.begin(generation, resume=resume, slots=3)
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            self.patch.delenv(
                name
            )  # with these variables, a trainer would wait for a rendezvous, which one rank does not need

    @property
    def completed(self) -> int:
        """The number of completed steps, as the agent sees it."""
        assert self.reports is not None
        return self.reports.snapshot().completed_steps

    @property
    def finished(self) -> bool:
        """Whether the loop ran to its end."""
        assert self.reports is not None
        return self.reports.snapshot().finished

    @property
    def records(self) -> list[StepRecord]:
        """The reports of this generation."""
        assert self.reports is not None
        return self.reports.records(0)[1]
