"""The base of every diagnostic test.

A test runs once, in a process of its own that may be killed at any moment: the agent waits until its deadline
and no longer. Its result is a fault, that all is well, or that there is nothing to test (``nothing``). A part that
cannot be tested is unknown (``CannotInspect``, ``OSError``), and no fault.
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
"""Every test can find this: something that it needs is missing, or denied."""
HANGS = Reason(
    "test-hangs",
    "a test did not end in time and was killed",
    owner=Owner.UNKNOWN,
    verdict=Health.UNKNOWN,
)
"""Every test can find this."""
CRASHED = Reason(
    "test-crashed",
    "the process of a test ended before the test did",
    owner=Owner.UNKNOWN,
    verdict=Health.UNKNOWN,
)
"""Every test can find this."""
COMMON = (UNABLE, HANGS, CRASHED)


class DiagnosticLimits(BaseModel):
    """The time limit of a test and its thresholds; the base of each test's own limits."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    deadline_s: float = Field(default=60.0, gt=0)
    """It is killed after this time, seconds."""


@dataclass(frozen=True, slots=True)
class Peer:
    """The other machine of a test between two machines."""

    position: int
    """Position of this machine: 0 waits for the other machine, 1 connects to it."""
    secret: str
    """What both know."""
    host: str = ""
    """Where position 0 waits …"""
    port: int = 0
    """… and the port that it said."""


@dataclass(frozen=True)
class Bench:
    """The machine and the resources that a test uses."""

    machine: str
    host: str = "127.0.0.1"
    """On which the agent listens: through its interface machines reach each other."""
    folder: Path = Path("/var/lib/everstep")
    """On the disk that is tested; files in it are removed."""
    peer: Peer | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables for gloo and NCCL that name the interface."""
    waits_at: Callable[[int], None] = lambda port: None
    """Says that this machine waits for its peer, and at which port."""


class DiagnosticTest(ABC):
    """Tests one part of the machine.

    Args:
        bench: Where it runs.
        limits: Its thresholds, of the type ``limits_type`` of the class.
    """

    name: ClassVar[Diagnostic]
    """In requests, results and docs; it does not change."""
    does: ClassVar[str]
    """One line."""
    reasons: ClassVar[tuple[Reason, ...]] = ()
    """All that it can find beside ``COMMON``."""
    limits_type: ClassVar[type[DiagnosticLimits]] = DiagnosticLimits
    imports: ClassVar[tuple[str, ...]] = ()
    """Modules that the process has imported from which it is forked."""

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
            CannotInspect: it cannot, with the reason.
            OSError: likewise.
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
