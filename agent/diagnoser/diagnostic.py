"""This module has the base class of diagnostic tests.

A test runs once, in a process of its own, which is killed at its deadline. The result is a fault, or success, or that
there is nothing to test (``nothing``). If a part cannot be tested (``CannotInspect``, ``OSError``), its verdict is
unknown and not faulty.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from everstep.model.diagnosis import BETWEEN_MACHINES, Diagnostic, DiagnosticResult
from everstep.model.finding import Finding, Health, Owner, Reason, Remedy

UNABLE = Reason(
    "test-unable",
    "it cannot be tested",
    owner=Owner.UNKNOWN,
    remedy=Remedy.CHECK_SETUP,
    verdict=Health.UNKNOWN,
)
"""Every test can report this, if something that it needs is missing or not permitted."""
HANGS = Reason(
    "test-hangs",
    "a test did not end in time and was killed",
    owner=Owner.UNKNOWN,
    verdict=Health.UNKNOWN,
)
"""Every test can report this."""
CRASHED = Reason(
    "test-crashed",
    "the process of a test ended before the test did",
    owner=Owner.UNKNOWN,
    verdict=Health.UNKNOWN,
)
"""Every test can report this."""
COMMON = (UNABLE, HANGS, CRASHED)


class DiagnosticLimits(BaseModel):
    """The time limit of a test and its thresholds. Each test derives a class with its own limits from this class."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    deadline_s: float = Field(default=60.0, gt=0)
    """The test is killed after this time, seconds."""


@dataclass(frozen=True, slots=True)
class Peer:
    """The other machine of a test between two machines."""

    position: int
    """Position of this machine: 0 waits for the other machine, 1 connects to it."""
    secret: str
    """Shared secret by which the two machines recognise each other."""
    host: str = ""
    """Address at which position 0 waits."""
    port: int = 0
    """Port at which position 0 waits."""


@dataclass(frozen=True)
class Bench:
    """The machine and the resources that a test uses."""

    machine: str
    host: str = "127.0.0.1"
    """Address on which the agent listens. Machines reach each other through its interface."""
    folder: Path = Path("/var/lib/everstep")
    """Folder on the disk that is tested. The test removes its files."""
    peer: Peer | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables for gloo and NCCL that name the network interface."""
    waits_at: Callable[[int], None] = lambda port: None
    """Reports the port at which this machine waits for its peer."""


class DiagnosticTest(ABC):
    """Tests one part of the machine.

    Args:
        bench: The machine and its resources.
        limits: Settings, of the class's ``limits_type``.
    """

    name: ClassVar[Diagnostic]
    """The name in requests and results; it does not change from release to release."""
    does: ClassVar[str]
    """One line for a person: what the test does."""
    reasons: ClassVar[tuple[Reason, ...]] = ()
    """All reasons of its findings, except for ``COMMON``."""
    limits_type: ClassVar[type[DiagnosticLimits]] = DiagnosticLimits
    imports: ClassVar[tuple[str, ...]] = ()
    """Modules that the parent process imports before it forks the test."""

    def __init__(self, bench: Bench, limits: DiagnosticLimits) -> None:
        self.bench = bench
        self.limits: Any = limits

    @classmethod
    def is_between(cls) -> bool:
        """Return whether the test needs two machines."""
        return cls.name in BETWEEN_MACHINES

    @abstractmethod
    def run(self) -> DiagnosticResult:
        """Test once.

        Raises:
            CannotInspect: the part cannot be tested; the message says why.
            OSError: the part cannot be tested, because of an error of the system.
        """

    @property
    def peer(self) -> Peer:
        """The other machine of a test between two machines."""
        assert self.bench.peer is not None
        return self.bench.peer

    def result(self, *findings: Finding, **more: Any) -> DiagnosticResult:
        """Make a result of this test; ``more`` contains its other fields."""
        return DiagnosticResult(test=self.name, findings=list(findings), **more)

    def nothing(self, why: str) -> DiagnosticResult:
        """Make the result that there is nothing to test."""
        return DiagnosticResult(test=self.name, nothing=why)

    def finding(self, reason: Reason, item: str = "", *evidence: str, text: str = "") -> Finding:
        """Make a finding of this test."""
        return reason.finding(self.name, item, *evidence, text=text)
